"""Writes batches to a database, one transaction for each. Repeats are recognised by their sequence numbers."""

import asyncio
import sqlite3

import anabranch

database = sqlite3.connect(":memory:")
database.execute(
    "CREATE TABLE orders (shard TEXT, sequence TEXT, sub INTEGER, data BLOB, UNIQUE (shard, sequence, sub))"
)

consumer = anabranch.Consumer("orders", app="warehouse", idle_timeout=2)


@consumer.batch_handler(max_records=1000, max_wait=0.5)
async def store(batch: anabranch.Batch[bytes]) -> None:
    rows = [(record.shard_id, record.sequence_number, record.sub_sequence_number, record.data) for record in batch]
    with database:
        database.executemany("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?)", rows)


async def main() -> None:
    async with anabranch.Producer("orders") as producer:
        await producer.put_many((f"customer-{number % 10}", str(number).encode()) for number in range(1000))
    await consumer.run()
    (count,) = database.execute("SELECT count(*) FROM orders").fetchone()
    print(f"{count} orders in the database")


asyncio.run(main())

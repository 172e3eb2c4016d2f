"""Writes that a database refuses if they come late: each row keeps the fence token of the worker that wrote it.

A worker that was paused may resume in the middle of a call, after another worker took over. Its token is lower than
that of the new owner, so its write changes nothing.
"""

import asyncio
import sqlite3

import anabranch

database = sqlite3.connect(":memory:")
database.execute("CREATE TABLE balances (customer TEXT PRIMARY KEY, amount INTEGER, fence INTEGER)")
UPSERT = """
    INSERT INTO balances VALUES (:customer, :amount, :fence)
    ON CONFLICT (customer) DO UPDATE SET amount = :amount, fence = :fence WHERE fence <= :fence
"""


def save(customer: str, amount: int, fence: int) -> bool:
    """False if a newer owner has written the row."""
    with database:
        return database.execute(UPSERT, {"customer": customer, "amount": amount, "fence": fence}).rowcount == 1


async def main() -> None:
    async with anabranch.Producer("orders") as producer:
        await producer.put(b"41", "customer-1")
    consumer = anabranch.Consumer("orders", app="balances", order="key", until="tip")

    @consumer.handler
    async def handle(record: anabranch.Record[bytes], context: anabranch.Context) -> None:
        save(record.partition_key, int(record.data), context.fence_token)

    await consumer.run()
    late = save("customer-1", 7, 0)  # as by a worker that has lost its lease
    (amount,) = database.execute("SELECT amount FROM balances").fetchone()
    print(f"balance {amount}, the late write was {'accepted' if late else 'refused'}")


asyncio.run(main())

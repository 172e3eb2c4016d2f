"""Reads orders, writes enriched ones: a record is acknowledged only after its result is delivered."""

import asyncio

import anabranch


async def main() -> None:
    async with anabranch.Producer("orders", encode=dict) as producer:
        for number in range(100):
            await producer.put({"order": number}, f"customer-{number % 10}")

    enriched = 0
    consumer = anabranch.Consumer("orders", app="enrich", decode=dict, order="key", idle_timeout=2)
    async with anabranch.Producer("orders", encode=dict) as producer:

        @consumer.handler
        async def enrich(record: anabranch.Record[dict[str, int]]) -> None:
            nonlocal enriched
            if "total" in record.value:
                return  # one of our own results: this example has only one stream to write to
            await producer.put_and_wait({**record.value, "total": 42}, record.partition_key)
            enriched += 1

        report = await consumer.run()
    print(f"enriched {enriched} orders, clean stop: {report.clean}")


asyncio.run(main())

"""Reads one stream and writes another: a record is acknowledged only after its result is delivered."""

import asyncio

import anabranch


async def main() -> None:
    async with anabranch.Producer("orders", encode=dict) as producer:
        for number in range(100):
            await producer.put({"order": number}, f"customer-{number % 10}")

    consumer = anabranch.Consumer("orders", app="enrich", decode=dict, order="key", until="tip")
    async with anabranch.Producer("results", encode=dict) as producer:

        @consumer.handler
        async def enrich(record: anabranch.Record[dict[str, int]]) -> None:
            await producer.put_and_wait({**record.value, "total": 42}, record.partition_key)

        report = await consumer.run()

    async with anabranch.Consumer("results", start="trim_horizon", until="tip", decode=dict) as results:
        enriched = sorted([record.value["order"] async for record in results])
    print(f"enriched {len(enriched)} orders, each once: {enriched == list(range(100))}, clean stop: {report.clean}")


asyncio.run(main())

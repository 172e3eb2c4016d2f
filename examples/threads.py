"""Code without an event loop: a blocking producer, and a plain function as the handler, run in threads."""

import anabranch

with anabranch.SyncProducer("orders") as producer:
    for number in range(200):
        producer.put(str(number).encode(), f"customer-{number % 20}")

seen: list[int] = []
consumer = anabranch.Consumer("orders", app="threads", order="key", concurrency=8, idle_timeout=2)
report = consumer.run_sync(lambda record: seen.append(int(record.data)))
print(f"handled {len(seen)} orders in threads, clean stop: {report.clean}")

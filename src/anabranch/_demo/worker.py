"""One worker process of the demo: an ordinary consumer that prints each record it handled.

Run as `python -m anabranch._demo.worker NAME STREAM LEASES READ`. Each line is one handled record, written in one piece
when the handler ends, so a killed process leaves no partial lines.
"""

import os
import sys
import time
from typing import Literal

from anabranch._engine.tasks import on_parent_exit
from anabranch.config import ConsumerSettings, LeaseSettings, PollingSettings
from anabranch.consumer import Consumer
from anabranch.records import Record

STDOUT = 1


def main(name: str, stream: str, leases: str, read: Literal["polling", "fanout"]) -> None:
    settings = ConsumerSettings(leases=LeaseSettings(worker_id=name), polling=PollingSettings(idle_interval=0.25))
    consumer = Consumer(stream, app="demo", leases=leases, order="key", read=read, settings=settings)

    @consumer.handler
    async def handle(record: Record[bytes]) -> None:
        line = f"{time.monotonic_ns()} {record.data.decode()} {name}\n"
        os.write(STDOUT, line.encode())

    consumer.run_sync()


if __name__ == "__main__":
    on_parent_exit(sys.stdin.fileno(), lambda: os._exit(1))  # a pipe that ends with the demo
    name, stream, leases, read = sys.argv[1:5]
    main(name, stream, leases, "fanout" if read == "fanout" else "polling")

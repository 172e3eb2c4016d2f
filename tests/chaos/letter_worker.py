"""A consumer that is killed at one step of a dead letter: `python letter_worker.py STEP URL JOURNAL`.

STEP is `decided` (the lease row says so, the letter is not written), `written` (the letter is, and the shard does not
know yet), `finished` (nothing is committed since), or `none`.
"""

import os
import signal
import sys
from pathlib import Path

import anabranch
from anabranch.dead_letters.opening import open_destination
from anabranch.events import RecordDeadLettered

STEP, URL, JOURNAL = sys.argv[1:]
SETTINGS = anabranch.ConsumerSettings(
    leases=anabranch.LeaseSettings(expiry=3.0), polling=anabranch.PollingSettings(idle_interval=0.2)
)


def die_at(step: str) -> None:
    if step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)


def note(text: str) -> None:
    with Path(JOURNAL).open("a") as file:
        file.write(f"{text}\n")


def main() -> None:
    destination = open_destination(URL, app="billing", environ={})

    async def write(letter: anabranch.letters.Letter) -> None:
        die_at("decided")
        await destination.write(letter)
        die_at("written")

    def on_event(event: anabranch.Event) -> None:
        if isinstance(event, RecordDeadLettered):
            die_at("finished")

    consumer = anabranch.Consumer(
        "orders",
        app="billing",
        until="tip",
        order="key",
        settings=SETTINGS,
        on_event=on_event,
        on_failure=anabranch.Retry(attempts=2, backoff=0.0, then=anabranch.DeadLetter(write)),
    )

    async def handle(record: anabranch.Record[bytes]) -> None:
        note(record.data.decode())
        if record.data.startswith(b"poison"):
            raise ValueError(record.data)

    consumer.run_sync(handle)


main()

"""A redrive that is killed at one step: `python redrive_worker.py STEP URL REVIEW JOURNAL`.

STEP is `read` (the letters are held), `handled` (the first is delivered and still there), `deleted` (it is gone),
`reviewed` (one that failed is in review and still here), or `none`. Holds expire after a second.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import anabranch
from anabranch.dead_letters import redrive, s3, sqlite, sqs
from anabranch.dead_letters.opening import LetterWriter

STEP, URL, REVIEW, JOURNAL = sys.argv[1:]
for module in (redrive, s3, sqlite, sqs):
    module.HOLD_SECONDS = 1
sqs.WAIT_SECONDS = 0


def die_at(step: str) -> None:
    if step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)


def handle(record: anabranch.Record[bytes]) -> None:
    die_at("read")
    with Path(JOURNAL).open("a") as file:
        file.write(f"{record.sequence_number}\n")
    if record.data == b"deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    if record.data == b"poison":
        raise ValueError("bad order")
    die_at("handled")


async def main() -> None:
    async with anabranch.DeadLetters(URL) as letters:
        delete, write = letters._box.delete, LetterWriter.write

        async def delete_and_die(stored):
            await delete(stored)
            die_at("deleted")

        async def write_and_die(self, letter):
            pointer = await write(self, letter)
            die_at("reviewed")
            return pointer

        letters._box.delete, LetterWriter.write = delete_and_die, write_and_die
        report = await letters.redrive(
            handle, review=REVIEW, policy=anabranch.Retry(attempts=1, backoff=0.0), concurrency=1
        )
        assert report.is_complete, report


asyncio.run(main())

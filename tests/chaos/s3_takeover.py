"""A worker on S3, with the intervals that ship: it is killed and started again, and then a second one takes over.

    PYTHONPATH=tests python tests/chaos/s3_takeover.py

Takes about three minutes.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from traffic import Traffic, spread_keys
from worker_fleet import Fleet, WorkerProcess
from worker_process import WorkerOptions

from services import MotoServer
from stream_world import stream_world

SHARDS = 4
PATIENCE = 150


class TakeOver(NamedTuple):
    written_count: int
    lost_count: int
    repeated_after_kill: int
    since_save_seconds: float
    """From the last save until the worker was killed."""
    restarted_seconds: float
    """From the kill until its successor handled records, the start of a process included."""
    overlap_seconds: float
    """From the first call of the second worker until the first one ended."""
    repeated_after_overlap: int
    repeated_after_stop: int
    first_exit_code: int | None
    first_words: str


async def run_takeover(folder: str) -> TakeOver:
    with MotoServer() as server:
        server.make_bucket("leases")
        options = WorkerOptions(
            stream="orders", app="billing", folder=folder, order="key", leases=server.leases("leases/chaos")
        )
        async with stream_world(shards=SHARDS) as world, Fleet(options, world.kinesis.environment()) as fleet:
            traffic = Traffic(world, spread_keys(SHARDS, 2), fleet.auditor, aggregate=False)
            writing = asyncio.create_task(traffic.steadily(0.25))
            run = _Run(fleet)
            (first,) = await fleet.join()
            saved_at = await run.until_saved()
            await asyncio.sleep(20)
            killed_at = await first.kill() / 1e9
            (second,) = await fleet.start()
            await run.until_works(second)
            restarted, after_kill = time.monotonic() - killed_at, run.take_repeats()
            (third,) = await fleet.join()
            await run.until_works(third)
            began = time.monotonic()
            await asyncio.wait_for(second.process.wait(), PATIENCE)
            overlap, after_overlap = time.monotonic() - began, run.take_repeats()
            fleet.workers.remove(second)  # it ended as it should
            writing.cancel()
            await traffic.close()
            await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled", PATIENCE)
            await third.terminate()
            (fourth,) = await fleet.join()
            await traffic_again(world, fleet, fourth, run)
            return TakeOver(
                fleet.auditor.report().written_count, fleet.auditor.report().lost_count, after_kill,
                killed_at - saved_at, restarted, overlap, after_overlap, run.take_repeats(),
                second.process.returncode, Path(folder, second.name).read_text(),  # noqa: ASYNC240 -- a moment
            )  # fmt: skip


async def traffic_again(world, fleet: Fleet, worker: WorkerProcess, run: "_Run") -> None:
    traffic = Traffic(world, spread_keys(SHARDS, 2), fleet.auditor, aggregate=False)
    await traffic.round()
    await run.until_works(worker)
    await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled", PATIENCE)
    await traffic.close()
    await worker.terminate()


class _Run:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen = 0

    def take_repeats(self) -> int:
        """Repeats and calls of the worker that was taken over, since the last time."""
        report = self._fleet.auditor.report()
        found, self._seen = report.repeated_count - self._seen, report.repeated_count
        return found

    async def until_saved(self) -> float:
        """Waits until the object has a position of every shard; returns when that was."""
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE:
            await asyncio.sleep(1)
            rows = await self._fleet.look_at_commits()
            if rows and all(row.checkpoint.watermark is not None for row in rows):
                return time.monotonic()
        raise TimeoutError("no position was saved")

    async def until_works(self, worker: WorkerProcess) -> None:
        fleet = self._fleet
        await fleet.until(
            lambda: any(effect.process_id == worker.id for effect in fleet.effects), f"{worker.name} works", PATIENCE
        )


def describe(found: TakeOver) -> str:
    return (
        f"a worker on S3: {found.written_count} written, {found.lost_count} lost\n  killed "
        f"{found.since_save_seconds:.0f} s after a save: its successor worked {found.restarted_seconds:.1f} s later "
        f"and repeated {found.repeated_after_kill} records\n  a second worker took over: both handled records for "
        f"{found.overlap_seconds:.0f} s, {found.repeated_after_overlap} repeated; the first ended with "
        f"{found.first_exit_code}\n  after a graceful stop: {found.repeated_after_stop} repeated"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(describe(asyncio.run(run_takeover(folder))))


if __name__ == "__main__":
    main()

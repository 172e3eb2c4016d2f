"""One worker, killed again and again while records come and shards split and merge: nothing lost, order kept.

PYTHONPATH=tests python tests/chaos/restarts.py --records 1000000 --order key
"""

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from contextlib import suppress
from typing import NamedTuple

from traffic import Resharding, Traffic, spread_keys
from worker_fleet import Fleet
from worker_process import WorkerOptions

from anabranch.testing import AuditReport

from stream_world import stream_world

KEYS = 64
KILLS = 3
RESHARD_EVERY_SECONDS = (0.3, 1.2)


class Restarts(NamedTuple):
    report: AuditReport
    splits: int
    merges: int
    repeats: list[int]
    """How many records each kill had handled twice."""
    seconds: float


async def run_restarts(
    folder: str, *, records: int, order: str, aggregate: bool, seed: int, patience: float
) -> Restarts:
    chance, began = random.Random(seed), time.monotonic()
    options = WorkerOptions(stream="orders", app="billing", folder=folder, order=order)
    async with stream_world(shards=2) as world, Fleet(options, world.kinesis.environment()) as fleet:
        fleet.keeps_effects = False
        traffic = Traffic(world, spread_keys(1, KEYS), fleet.auditor, aggregate=aggregate)
        resharding = Resharding(world, chance, shards_min=1, shards_max=8)
        (worker,) = await fleet.join()
        # Records come for some seconds at least, so that shards are read while they split.
        writing = asyncio.create_task(traffic.steadily(KEYS * 8 / records, until_count=records))
        reshards = asyncio.create_task(resharding.steadily(RESHARD_EVERY_SECONDS))
        repeats = []
        try:
            for kill in range(1, KILLS + 1):
                wanted = records * kill // (KILLS + 1)
                await fleet.until(
                    lambda wanted=wanted: traffic.written_count - fleet.auditor.outstanding_count >= wanted,
                    f"{wanted} handled",
                    patience,
                )
                await worker.kill()
                await fleet.look_at_commits()
                repeats.append(fleet.auditor.report().repeated_count)
                (worker,) = await fleet.join()
            await asyncio.wait_for(writing, patience)
            reshards.cancel()
            await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled", patience)
        finally:
            for task in (writing, reshards):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await traffic.close()
        await worker.terminate()
        ended = await fleet.event("Ended", worker)
        assert ended["clean"], "the last stop was not clean"
        await fleet.look_at_commits()
        report = fleet.auditor.report()
        repeats.append(report.repeated_count)
        return Restarts(
            report,
            resharding.split_count,
            resharding.merge_count,
            [later - earlier for earlier, later in itertools.pairwise(repeats)],
            time.monotonic() - began,
        )


def describe(found: Restarts) -> str:
    return (
        f"restarts: {found.report}\n  {found.splits} splits, {found.merges} merges, {KILLS} times kill -9; "
        f"repeated after each: {found.repeats}; {found.seconds:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--order", choices=("shard", "key"), default="shard")
    parser.add_argument("--aggregate", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            run_restarts(
                folder,
                records=options.records,
                order=options.order,
                aggregate=options.aggregate,
                seed=options.seed,
                patience=1800,
            )
        )
    print(describe(found))
    assert found.report.ok


if __name__ == "__main__":
    main()

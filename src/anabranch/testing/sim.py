"""`python -m anabranch.testing.sim`: replays one seed, or tries fresh ones on all cores.

    --seed 42               replay one world and show what it is like
    --seconds 60            fresh seeds until the time is up
    --worlds 100000         so many seeds, from --first on
    --protocol              the lease protocol alone, without asyncio: some sixty worlds a second and core

A failure ends with its seed and the one command that replays it. Seeds depend on nothing but their number: the same one
is the same world in every process and on every machine.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import SystemRandom

import msgspec

from anabranch.testing.tick import Verdict, options_for, run_world

__all__ = ["main"]

_CHUNK = 50


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m anabranch.testing.sim", description="Whole fleets on one seed, with faults and checkers."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="replay this world")
    what.add_argument("--seconds", type=float, help="fresh seeds for so long")
    what.add_argument("--worlds", type=int, help="so many seeds")
    parser.add_argument("--first", type=int, help="the first seed; random if absent")
    parser.add_argument("--protocol", action="store_true", help="the lease protocol alone, without asyncio")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _replay(options.seed)
    first = SystemRandom().randrange(1 << 40) if options.first is None else options.first
    return _try_many(first, options.worlds, options.seconds or (None if options.worlds else 10.0), options.cores)


def _replay(seed: int) -> int:
    _say(f"world {seed}: {_described(seed)}")
    verdict = run_world(seed)
    _say(
        f"{verdict.events} events, {verdict.starts} starts in {verdict.tenures} tenures, {verdict.takes} takes, "
        f"{verdict.seals} seals, {verdict.zombies} zombies, {verdict.repeats} repeats"
    )
    for violation in verdict.violations:
        _say(f"  {violation}")
    _say("broken" if verdict.violations else "clean")
    return 1 if verdict.violations else 0


def _try_many(first: int, worlds: int | None, seconds: float | None, cores: int) -> int:
    began = time.monotonic()
    totals: Counter[str] = Counter()
    broken: list[Verdict] = []
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        for counts, failures in pool.imap_unordered(_run_chunk, _chunks(first, worlds, seconds)):
            totals.update(counts)
            broken.extend(failures)
            if broken and worlds is None:
                break
    lasted = time.monotonic() - began
    _say(
        f"{totals['worlds']} worlds from seed {first} in {lasted:.0f} s on {cores} cores: {totals['events']} events, "
        f"{totals['starts']} starts in {totals['tenures']} tenures, {totals['takes']} takes, {totals['seals']} seals, "
        f"{totals['zombies']} zombies, {totals['stale_dispatches']} stale dispatches"
    )
    for verdict in sorted(broken, key=lambda verdict: verdict.seed)[:10]:
        _say(f"world {verdict.seed} {_described(verdict.seed)}\n  {verdict.violations[0]}")
        _say(f"  replay: python -m anabranch.testing.sim --protocol --seed {verdict.seed}")
    _say(f"{len(broken)} broken" if broken else "all clean")
    return 1 if broken else 0


def _chunks(first: int, worlds: int | None, seconds: float | None) -> Iterator[tuple[int, int]]:
    began = time.monotonic()
    begin = first
    while (seconds is None or time.monotonic() - began < seconds) and (worlds is None or begin < first + worlds):
        end = begin + _CHUNK if worlds is None else min(begin + _CHUNK, first + worlds)
        yield begin, end
        begin = end


def _run_chunk(seeds: tuple[int, int]) -> tuple[Counter[str], list[Verdict]]:
    totals: Counter[str] = Counter()
    broken: list[Verdict] = []
    for seed in range(*seeds):
        verdict = run_world(seed)
        totals["worlds"] += 1
        for name in ("events", "starts", "tenures", "takes", "seals", "zombies", "stale_dispatches"):
            totals[name] += getattr(verdict, name)
        if verdict.violations:
            broken.append(verdict)
    return totals, broken


def _described(seed: int) -> str:
    """The options of a world that differ from a world without faults."""
    chosen = msgspec.structs.asdict(options_for(seed))
    return ", ".join(f"{name}={value}" for name, value in chosen.items() if value)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

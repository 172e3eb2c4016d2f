"""Replays one seed of a simulation, or tries fresh seeds on all cores.

For each failure it prints the seed and the command that replays it. A seed gives the same world in every process and on
every machine.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from random import SystemRandom
from typing import Any

import msgspec

_PROGRESS_EACH = 10_000


class Simulation(msgspec.Struct, frozen=True):
    """What a world is. Its functions go to other processes, so they stand at the top of a module."""

    name: str
    command: str
    """The command that runs it."""
    run: Callable[[int], Any]
    """A seed's verdict."""
    options_for: Callable[[int], msgspec.Struct]
    counts: tuple[str, ...]
    """The numbers of a verdict that are added up."""
    chunk: int
    """Worlds that take about half a second to a second, so that --seconds ends in time."""


def search(simulation: Simulation, arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=simulation.command,
        description="Simulates whole fleets from a seed, with faults and checkers.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="replay this world")
    what.add_argument("--seconds", type=float, help="try fresh seeds for this long")
    what.add_argument("--worlds", type=int, help="try this many seeds")
    parser.add_argument("--first", type=int, help="the first seed (default: random)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _replay(simulation, options.seed)
    first = SystemRandom().randrange(1 << 40) if options.first is None else options.first
    seconds = options.seconds or (None if options.worlds else 10.0)
    return _try_many(simulation, _chunks(simulation, first, options.worlds, seconds), options.cores)


def _replay(simulation: Simulation, seed: int) -> int:
    _say(f"{simulation.name} {seed}: {_described(simulation, seed)}")
    verdict = simulation.run(seed)
    _say(", ".join(f"{getattr(verdict, name)} {name.replace('_', ' ')}" for name in simulation.counts))
    for violation in verdict.violations:
        _say(f"  {violation}")
    _say("broken" if verdict.violations else "clean")
    return 1 if verdict.violations else 0


def _try_many(simulation: Simulation, chunks: Iterator[tuple[Simulation, int, int]], cores: int) -> int:
    began = time.monotonic()
    totals: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Only two chunks per core at a time, so that --seconds ends in time.
        running = {pool.submit(_run_chunk, chunk) for chunk in islice(chunks, 2 * cores)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for chunk in done:
                counts, failures = chunk.result()
                totals.update(counts)
                broken.extend(failures)
                if totals["worlds"] // _PROGRESS_EACH > (totals["worlds"] - counts["worlds"]) // _PROGRESS_EACH:
                    _say(f"{totals['worlds']} worlds so far, {len(broken)} broken")
                running |= {pool.submit(_run_chunk, next_one) for next_one in islice(chunks, 1)}
    counted = ", ".join(f"{totals[name]} {name.replace('_', ' ')}" for name in simulation.counts)
    each_ms = totals["cpu_ms"] / max(1, totals["worlds"])
    _say(
        f"{totals['worlds']} worlds in {time.monotonic() - began:.0f} s on {cores} cores, "
        f"{each_ms:.3g} ms of processor time each: {counted}"
    )
    for seed, what in sorted(broken)[:10]:
        _say(f"{simulation.name} {seed}: {_described(simulation, seed)}\n  {what}")
        _say(f"  replay: {simulation.command} --seed {seed}")
    _say(f"{len(broken)} broken" if broken else "all clean")
    return 1 if broken else 0


def _chunks(
    simulation: Simulation, first: int, worlds: int | None, seconds: float | None
) -> Iterator[tuple[Simulation, int, int]]:
    until = None if seconds is None else time.monotonic() + seconds
    begin = first
    while (until is None or time.monotonic() < until) and (worlds is None or begin < first + worlds):
        end = begin + simulation.chunk if worlds is None else min(begin + simulation.chunk, first + worlds)
        yield simulation, begin, end
        begin = end


def _run_chunk(chunk: tuple[Simulation, int, int]) -> tuple[Counter[str], list[tuple[int, str]]]:
    simulation, begin, end = chunk
    totals: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    began_ns = time.process_time_ns()
    for seed in range(begin, end):
        try:
            verdict = simulation.run(seed)
        except Exception as error:  # noqa: BLE001 -- any error of a world is a finding
            broken.append((seed, f"{type(error).__name__}: {error}"))
            continue
        totals["worlds"] += 1
        for name in simulation.counts:
            totals[name] += getattr(verdict, name)
        if verdict.violations:
            broken.append((seed, str(verdict.violations[0])))
    totals["cpu_ms"] = (time.process_time_ns() - began_ns) // 1_000_000
    return totals, broken


def _described(simulation: Simulation, seed: int) -> str:
    """The options of a world that are not zero."""
    options = simulation.options_for(seed)
    return ", ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(options).items() if value)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

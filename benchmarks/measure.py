"""Measuring candidates beside each other: CPU time of this process, rounds interleaved, medians with their spread.

On a shared machine the clock lies and speeds drift within a minute. So CPU time is counted, never wall time; every
round runs every candidate once, so that a drift meets all of them; and the ratios are those of neighbours in a round.

What is measured is printed, and also appended to the file that ANABRANCH_BENCH_RESULTS names, one JSON object a line:
`run.py` makes the page of all results from it.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

ROUNDS = 9
ROUND_SECONDS = 0.05


class Figure(NamedTuple):
    """Microseconds of CPU per unit, and what multiple of the reference that is: medians, with their quartiles."""

    microseconds: float
    microseconds_spread: tuple[float, float]
    ratio: float
    ratio_spread: tuple[float, float]


def compare(candidates: Mapping[str, Callable[[], object]], units: int, *, reference: str) -> dict[str, Figure]:
    """Each candidate does the same `units` of work (records, say) in one call."""
    repeats = {name: _repeats(call) for name, call in candidates.items()}
    rounds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, call in candidates.items():
            rounds[name].append(_seconds(call, repeats[name]) / repeats[name] / units * 1e6)
    return figures_of(rounds, reference=reference)


def figures_of(rounds: Mapping[str, list[float]], *, reference: str) -> dict[str, Figure]:
    """From each candidate's microseconds per unit, one of each round."""
    figures = {}
    for name, times in rounds.items():
        ratios = [mine / theirs for mine, theirs in zip(times, rounds[reference], strict=True)]
        figures[name] = Figure(
            statistics.median(times), _quartiles(times), statistics.median(ratios), _quartiles(ratios)
        )
    return figures


def print_table(title: str, figures: Mapping[str, Figure], *, unit: str, reference: str) -> None:
    for name, figure in figures.items():
        low, high = figure.microseconds_spread
        record("figure", table=title, name=name, unit=unit, microseconds=figure.microseconds, low=low, high=high)
    print(f"\n{title}")
    print(f"  {'':24}{'us of CPU per ' + unit:>26}   {'times ' + reference:>24}")
    for name, figure in figures.items():
        low, high = figure.microseconds_spread
        ratio_low, ratio_high = figure.ratio_spread
        print(
            f"  {name:24}{figure.microseconds:10.2f} ({low:.2f} to {high:.2f})".ljust(54)
            + f"{figure.ratio:8.2f} ({ratio_low:.2f} to {ratio_high:.2f})"
        )


def record(kind: str, **members: object) -> None:
    if path := os.environ.get("ANABRANCH_BENCH_RESULTS"):
        with Path(path).open("a") as results:
            results.write(json.dumps({"kind": kind, "benchmark": Path(sys.argv[0]).stem, **members}) + "\n")


def value(name: str, amount: float, unit: str) -> None:
    """Records a figure that is not CPU time per unit, and has no target."""
    record("value", name=name, value=round(amount, 3), unit=unit)


def target(name: str, value: float, wanted: float, *, at_least: bool = True) -> str:
    """Records a result that has a target. Returns the target and whether it is met, for the end of a line."""
    met = value >= wanted if at_least else value <= wanted
    record("target", name=name, value=round(value, 3), wanted=wanted, at_least=at_least, met=met)
    return f"target: at {'least' if at_least else 'most'} {wanted:g}, {'met' if met else 'MISSED'}"


def _repeats(call: Callable[[], object]) -> int:
    """How many calls make a round long enough to time."""
    repeats = 1
    while (taken := _seconds(call, repeats)) < ROUND_SECONDS / 4:
        repeats *= 2
    return max(1, round(repeats * ROUND_SECONDS / taken))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    gc.collect()
    start = time.process_time()
    for _ in range(repeats):
        call()
    return time.process_time() - start


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high

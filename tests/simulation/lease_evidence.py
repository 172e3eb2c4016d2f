"""`python tests/simulation/lease_evidence.py`: in how many of 250 worlds each broken lease protocol is caught.

The same worlds, with the protocol as it is, must all be clean. Its table is in docs/how-it-is-tested.md.
"""

import sys
from concurrent.futures import ProcessPoolExecutor

from protocol.variants import VARIANTS, NoGapRule
from protocol.world import run_world
from test_lease_protocol import OUTAGE, catches

from anabranch._core.leases.machine import LeaseMachine

WORLDS = 250
OUTAGES = 200


def caught(name: str) -> int:
    return sum(catches(VARIANTS[name], seed) for seed in range(WORLDS))


def broken_as_it_is(name: str) -> int:
    return sum(bool(run_world(seed, VARIANTS[name].options).violations) for seed in range(WORLDS))


def moves(machine_class: type[LeaseMachine]) -> int:
    return sum(run_world(seed, OUTAGE, machine_class=machine_class).takes - 3 for seed in range(OUTAGES))


def main() -> None:
    alike = {VARIANTS[name].options: name for name in VARIANTS}
    with ProcessPoolExecutor() as pool:
        as_it_is = sum(pool.map(broken_as_it_is, alike.values()))
        lines = [f"| as it is, in the worlds of all the others ({WORLDS * len(alike):,}) | {as_it_is} |"]
        for (name, variant), count in zip(VARIANTS.items(), pool.map(caught, VARIANTS), strict=True):
            lines.append(f"| {name} | {count} ({variant.complaint}) |")
        with_rule, without = pool.map(moves, (LeaseMachine, NoGapRule))
        lines.append(f"moves in {OUTAGES} outages: {with_rule} with the gap rule, {without} without it")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

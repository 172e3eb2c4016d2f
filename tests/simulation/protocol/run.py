"""`python tests/simulation/protocol/run.py`: replays one world of the lease protocol, or tries fresh ones on all cores.

--seed 42               replay one world and print its options
--seconds 60            try fresh seeds for this long (10 s by default)
--worlds 100000         try this many seeds, from --first on
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from seed_search import Simulation, search

from protocol.faults import options_for
from protocol.world import run_world

PROTOCOL = Simulation(
    "protocol",
    "python tests/simulation/protocol/run.py",
    run_world,
    options_for,
    ("events", "starts", "tenures", "takes", "seals", "gifts", "zombies", "stale_dispatches"),
    200,
)

if __name__ == "__main__":
    sys.exit(search(PROTOCOL))

"""The lease protocol in a simulation without asyncio: thousands of rounds a second, whole fleets on one seed.

The pure core (`_core.leases`) is run by small workers against a linearizable store, over a network that loses, delays
and repeats messages, on clocks that err and stop, in processes that pause and die. Checkers watch what the workers
start and what the store takes, and know nothing of how either decides.
"""

from anabranch.testing.tick.options import WorldOptions, options_for
from anabranch.testing.tick.store import TickStore
from anabranch.testing.tick.worker import TickWorker
from anabranch.testing.tick.world import Verdict, World, run_world

__all__ = ["TickStore", "TickWorker", "Verdict", "World", "WorldOptions", "options_for", "run_world"]

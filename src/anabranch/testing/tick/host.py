"""Where a simulated worker runs: its process, its way to the store, and who watches what it starts."""

import msgspec

from anabranch._core.leases.timing import LeaseTiming
from anabranch.testing.tick.dice import Dice
from anabranch.testing.tick.journal import TickJournal
from anabranch.testing.tick.network import Link
from anabranch.testing.tick.options import WorldOptions
from anabranch.testing.tick.process import Process
from anabranch.testing.tick.store import TickStore

__all__ = ["Host"]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Of the process; unique in the world, whatever the worker is configured as."""
    worker_id: str
    process: Process
    link: Link
    store: TickStore
    timing: LeaseTiming
    options: WorldOptions
    journal: TickJournal
    dice: Dice

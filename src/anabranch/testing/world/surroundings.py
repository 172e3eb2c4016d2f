"""What all processes of a simulated fleet have in common, in one value."""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

from anabranch.policies import Retry
from anabranch.records import Context, Record
from anabranch.testing.journal import Journal
from anabranch.testing.world.lease_store import ForgetfulRows
from anabranch.testing.world.network import Network
from anabranch.testing.world.options import FleetOptions
from anabranch.testing.world.stream import SimulatedStream

__all__ = ["Handler", "SimulatedHandling", "Surroundings"]

Handler = Callable[[Record[Any], Context], Awaitable[Any]]


class SimulatedHandling(NamedTuple):
    """What a user's own simulation does with its records; what is left out is pretended."""

    handler: Handler | None = None
    policy: Retry | None = None
    decode: Callable[[bytes], Any] | None = None


class Surroundings(NamedTuple):
    options: FleetOptions
    random: Random
    network: Network
    journal: Journal
    stream: SimulatedStream
    rows: ForgetfulRows
    handling: SimulatedHandling
    tries: dict[bytes, int]
    """How often each record was tried in loops, which count no attempts, by any process."""

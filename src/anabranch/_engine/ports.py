"""Everything outside of the engine that it touches, in one value: the ports, and whom to tell what happens."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from anabranch._model.entropy import Entropy
from anabranch._ports import Clock, Kinesis, LeaseStore
from anabranch.events import Event


@dataclass(slots=True)
class StoreFailures:
    """How many lease store calls had no answer. After one, the next call may reach another storage (rule L13)."""

    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    kinesis: Kinesis
    store: LeaseStore
    clock: Clock
    entropy: Entropy
    emit: Callable[[Event], None]
    store_failures: StoreFailures = field(default_factory=StoreFailures)
    heart_on_thread: bool = False
    """Heartbeats run on a thread of their own; in a simulation, which has no threads, beside everything else."""
    before_call: Callable[[], Awaitable[None]] | None = None
    """Awaited between the look at the fence and the handler's call: where a process may be stopped at the worst moment.
    A simulation stops it there; nothing else sets it."""

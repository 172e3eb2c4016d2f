"""Everything that a consumer's engine needs from outside: Kinesis, the lease store, clock, randomness, events."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from anabranch._core.leases.machine import StoreFailures
from anabranch._model.entropy import Entropy
from anabranch._ports import Clock, Kinesis, LeaseStore
from anabranch.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    kinesis: Kinesis
    store: LeaseStore
    clock: Clock
    entropy: Entropy
    emit: Callable[[Event], None]
    store_failures: StoreFailures = field(default_factory=StoreFailures)
    heartbeats_on_thread: bool = False
    """Whether heartbeats have their own thread. A simulation has no threads: it sends them from the event loop."""
    before_call: Callable[[], Awaitable[None]] | None = None
    """For simulations: awaited between the fence check and the handler call, the worst moment for a process to
    pause."""

"""Everything that a consumer's engine needs from outside: Kinesis, the lease store, clock, randomness, events."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from anabranch._engine.tracing import Tracing
from anabranch._model.entropy import Entropy
from anabranch._ports import Clock, Kinesis, LeaseStore, LetterDestination
from anabranch.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    kinesis: Kinesis
    store: LeaseStore
    clock: Clock
    entropy: Entropy
    emit: Callable[[Event], None]
    letters: LetterDestination | None = None
    """Where dead letters go, if the policy writes some."""
    heartbeats_on_thread: bool = False
    """Whether heartbeats have their own thread. A simulation has no threads: it sends them from the event loop."""
    tracing: Tracing | None = None
    """None: nothing is traced."""
    add_metric: Callable[[str, float], None] | None = None
    """Receives the metrics that handlers report with `context.metric`; None drops them."""
    before_call: Callable[[], Awaitable[None]] | None = None
    """For simulations: awaited between the fence check and the handler call, the worst moment for a process to
    pause."""

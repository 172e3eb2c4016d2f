"""Scripted faults: which calls go wrong, how, and how often. Pure: the server or the simulation performs the plan.

    faults.on("PutRecords").throttle(slots=[1, 3]).once()
    faults.on("GetRecords", stream="orders").lose_response().with_probability(0.1)

Every call is matched against all rules, in the order they were added. Delays add up, slots are combined, and the first
rule that ends the call decides how. Probabilities use the entropy passed at construction, so a seed repeats a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec

from anabranch._model.entropy import Entropy
from anabranch.limits import SHARD_ITERATOR_LIFETIME_MS
from anabranch.local.errors import THROUGHPUT_EXCEEDED, LocalError, expired_iterator
from anabranch.local.shapes import REQUESTS

FaultKind = Literal[
    "delay", "drop", "error", "expire_iterator", "fall_silent", "half_open", "lose_response", "throttle", "time_out"
]
"""FaultScript describes each."""

Loss = Literal["hang_up", "silence"]
"""How a response is lost: the connection is reset, or it stays open and silent."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rule. The admin endpoint takes and returns it as JSON."""

    fault: FaultKind
    operation: str = "*"
    stream: str | None = None
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """How many calls it affects at most; None for no limit."""
    skip: _Count = 0
    """How many matching calls pass first."""
    probability: _Share = 1.0
    slots: list[_Count] | None = None
    slot_probability: _Share | None = None
    code: str | None = None
    message: str | None = None
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)] = 0.0
    events: _Count | None = None
    """SubscribeToShard: how many events are sent before the fault; None for a fault before the first byte."""
    matched: _Count = 0
    struck: _Count = 0

    def __post_init__(self) -> None:
        if self.operation != "*" and self.operation not in REQUESTS:
            known = ", ".join(sorted(REQUESTS))
            raise ValueError(f"unknown operation {self.operation!r}: use * for all, or one of {known}")

    def once(self) -> "Fault":
        return self.at_most(1)

    def at_most(self, times: int) -> "Fault":
        self.times = times
        return self

    def after(self, calls: int) -> "Fault":
        """Lets this many matching calls pass first."""
        self.skip = calls
        return self

    def with_probability(self, probability: float) -> "Fault":
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability must be between 0 and 1, not {probability}")
        self.probability = probability
        return self

    @property
    def spent(self) -> bool:
        return self.times is not None and self.struck >= self.times


@dataclass(slots=True)
class CallPlan:
    """What happens to one call: the combined effect of all matching rules."""

    delay_ms: int = 0
    refusal: LocalError | None = None
    """The call is not performed and fails with this error."""
    loss_before: Loss | None = None
    """The call is not performed and gets no response."""
    loss_after: Loss | None = None
    """The call is performed and gets no response."""
    refused_slots: dict[int, str] = field(default_factory=dict)
    """PutRecords: the ErrorCode of each entry that fails, by index."""
    events: int | None = None
    """SubscribeToShard: `loss_after` applies after this many events."""


NO_FAULT: Final = CallPlan()


class FaultScript:
    """The kinds of faults. Each method adds a rule and returns it, so that `.once()` and others can follow."""

    def __init__(self, faults: "Faults", operation: str, stream: str | None) -> None:
        self._faults = faults
        self._operation = operation
        self._stream = stream

    def throttle(self, *, slots: Sequence[int] | None = None, slot_probability: float | None = None) -> Fault:
        """ProvisionedThroughputExceededException, for the call or for some entries of PutRecords."""
        return self._add("throttle", slots=None if slots is None else list(slots), slot_probability=slot_probability)

    def fail(
        self, status: int = 500, code: str = "InternalFailure", message: str = "Internal Service Failure"
    ) -> Fault:
        """A 5xx for the whole call, which is not performed. Use `error(..., slots=...)` to fail PutRecords entries."""
        return self._add("error", status=status, code=code, message=message)

    def error(self, code: str, message: str = "", *, status: int = 400, slots: Sequence[int] | None = None) -> Fault:
        """Any error of the service. With `slots`, it is the ErrorCode of these PutRecords entries."""
        listed = None if slots is None else list(slots)
        return self._add("error", code=code, message=message, status=status, slots=listed)

    def resource_in_use(self, message: str = "Another active subscription exists for this consumer.") -> Fault:
        return self._add("error", code="ResourceInUseException", message=message, status=400)

    def delay(self, seconds: float) -> Fault:
        return self._add("delay", seconds=seconds)

    def time_out(self) -> Fault:
        """The call takes effect and no response ever comes."""
        return self._add("time_out")

    def lose_response(self) -> Fault:
        """The call takes effect and the connection breaks before the response."""
        return self._add("lose_response")

    def drop(self, *, events: int | None = None) -> Fault:
        """The connection breaks before the call takes effect. A subscription breaks after `events` events."""
        return self._add("drop", events=events)

    def half_open(self) -> Fault:
        """The call has no effect, and the connection stays open and silent."""
        return self._add("half_open")

    def expire_iterator(self) -> Fault:
        return self._add("expire_iterator")

    def fall_silent(self, *, events: int = 0) -> Fault:
        """A subscription is accepted but sends nothing after `events` events, not even heartbeats."""
        return self._add("fall_silent", events=events)

    def _add(self, kind: FaultKind, **settings: Any) -> Fault:
        return self._faults.add(Fault(fault=kind, operation=self._operation, stream=self._stream, **settings))


class Faults:
    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self._rules: list[Fault] = []

    def on(self, operation: str = "*", *, stream: str | None = None) -> FaultScript:
        """`operation` is AWS's name of the operation, or `*` for all."""
        return FaultScript(self, operation, stream)

    def add(self, fault: Fault) -> Fault:
        """For rules from JSON. The methods of `on(...)` add their rules themselves."""
        self._rules.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        self._rules = [rule for rule in self._rules if rule is not fault]

    def clear(self) -> None:
        self._rules.clear()

    @property
    def rules(self) -> tuple[Fault, ...]:
        return tuple(self._rules)

    @property
    def is_empty(self) -> bool:
        return not self._rules

    def plan(self, operation: str, *, stream: str | None, slot_count: int, now_ms: int) -> CallPlan:
        """Counts the call for every matching rule. `slot_count` is the number of PutRecords entries."""
        plan = NO_FAULT
        for rule in self._rules:
            if rule.spent or rule.operation not in {"*", operation} or rule.stream not in {None, stream}:
                continue
            rule.matched += 1
            if rule.matched <= rule.skip or (rule.probability < 1.0 and self._entropy.random() >= rule.probability):
                continue
            if plan is NO_FAULT:
                plan = CallPlan()
            if self._apply(rule, plan, slot_count, now_ms):
                rule.struck += 1
        return plan

    def _apply(self, rule: Fault, plan: CallPlan, slot_count: int, now_ms: int) -> bool:
        """False if the rule has no effect on this call."""
        if rule.fault == "delay":
            plan.delay_ms += round(rule.seconds * 1000)
            return True
        if rule.slots is not None or rule.slot_probability is not None:
            slots = self._choose_slots(rule, slot_count)
            plan.refused_slots.update(dict.fromkeys(slots, rule.code or THROUGHPUT_EXCEEDED))
            return bool(slots)
        if plan.refusal is not None or plan.loss_before is not None or plan.loss_after is not None:
            return False
        if rule.fault in {"throttle", "error", "expire_iterator"}:
            plan.refusal = _refusal(rule, now_ms)
            return True
        loss: Loss = "hang_up" if rule.fault in {"drop", "lose_response"} else "silence"
        if rule.fault in {"drop", "fall_silent"} and rule.events is not None:
            plan.events, plan.loss_after = rule.events, loss
        elif rule.fault in {"drop", "half_open"}:
            plan.loss_before = loss
        else:
            plan.loss_after = loss
        return True

    def _choose_slots(self, rule: Fault, count: int) -> list[int]:
        chosen = {slot for slot in rule.slots or () if slot < count}
        if rule.slot_probability is not None:
            chosen |= {slot for slot in range(count) if self._entropy.random() < rule.slot_probability}
        return sorted(chosen)


def _refusal(rule: Fault, now_ms: int) -> LocalError:
    if rule.fault == "expire_iterator":
        return expired_iterator(now_ms - SHARD_ITERATOR_LIFETIME_MS - 1_000, now_ms, SHARD_ITERATOR_LIFETIME_MS)
    if rule.fault == "throttle":
        return LocalError(rule.code or THROUGHPUT_EXCEEDED, rule.message or "Rate exceeded.", rule.status or 400)
    return LocalError(rule.code or "InternalFailure", rule.message or "Internal Service Failure", rule.status or 500)

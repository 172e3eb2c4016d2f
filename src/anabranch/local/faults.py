"""Scripted faults: which calls go wrong, how, and how often. Pure: it decides, the shell (or the simulation) does.

    faults.on("PutRecords").throttle(slots=[1, 3]).once()
    faults.on("GetRecords", stream="orders").lose_response().with_probability(0.1)

Every matching rule is asked for every call, in the order they were made. What strikes together adds up: delays are
summed, slots are joined, and the first of the rules that end the call decides how it ends. Chance comes from the
entropy given at construction, so one seed gives one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec

from anabranch._model.entropy import Entropy
from anabranch.limits import SHARD_ITERATOR_LIFETIME_MS
from anabranch.local.errors import LocalError, expired_iterator

__all__ = ["NO_FAULT", "CallPlan", "Fault", "FaultScript", "Faults", "Loss"]

FaultKind = Literal[
    "delay", "drop", "error", "expire_iterator", "fall_silent", "half_open", "lose_response", "throttle", "time_out"
]
"""See FaultScript for what each does."""

Loss = Literal["hang_up", "silence"]
"""How an answer is lost: the connection is reset, or stays open and nothing comes."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_THROUGHPUT_EXCEEDED: Final = "ProvisionedThroughputExceededException"


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rule. As JSON it is what the admin endpoint takes and shows."""

    fault: FaultKind
    operation: str = "*"
    stream: str | None = None
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """How often it strikes at most; None is for ever."""
    skip: _Count = 0
    """How many matching calls are let through first."""
    probability: _Share = 1.0
    slots: list[_Count] | None = None
    slot_probability: _Share | None = None
    code: str | None = None
    message: str | None = None
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3_600.0)] = 0.0
    events: _Count | None = None
    """SubscribeToShard: how many events arrive before the subscription goes wrong; None is before the first byte."""
    matched: _Count = 0
    struck: _Count = 0

    def once(self) -> "Fault":
        return self.at_most(1)

    def at_most(self, times: int) -> "Fault":
        self.times = times
        return self

    def after(self, calls: int) -> "Fault":
        """Strikes only after so many matching calls went well."""
        self.skip = calls
        return self

    def with_probability(self, probability: float) -> "Fault":
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"a probability lies between 0 and 1, not at {probability}")
        self.probability = probability
        return self

    @property
    def spent(self) -> bool:
        return self.times is not None and self.struck >= self.times


@dataclass(slots=True)
class CallPlan:
    """What happens to one call."""

    delay_ms: int = 0
    """Before anything else."""
    refusal: LocalError | None = None
    """The answer, in place of doing the call."""
    loss_before: Loss | None = None
    """The call is not done and there is no answer."""
    loss_after: Loss | None = None
    """The call is done and there is no answer."""
    refused_slots: dict[int, str] = field(default_factory=dict)
    """PutRecords: index of an entry to the ErrorCode it gets."""
    events: int | None = None
    """SubscribeToShard: after so many events the subscription ends as `loss_after` says."""


NO_FAULT: Final = CallPlan()


class FaultScript:
    """The faults that a call can have. Each method makes one rule and returns it, for `.once()` and the like."""

    def __init__(self, faults: "Faults", operation: str, stream: str | None) -> None:
        self._faults = faults
        self._operation = operation
        self._stream = stream

    def throttle(self, *, slots: Sequence[int] | None = None, slot_probability: float | None = None) -> Fault:
        """ProvisionedThroughputExceededException, for the call or (PutRecords) for some of its entries."""
        return self._add("throttle", slots=None if slots is None else list(slots), slot_probability=slot_probability)

    def fail(
        self, status: int = 500, code: str = "InternalFailure", message: str = "Internal Service Failure"
    ) -> Fault:
        """A 5xx for the whole call, which is not done; `error(..., slots=...)` fails single entries of a PutRecords."""
        return self._add("error", status=status, code=code, message=message)

    def error(self, code: str, message: str = "", *, status: int = 400, slots: Sequence[int] | None = None) -> Fault:
        """Any error of the service; with `slots`, the ErrorCode of these entries of a PutRecords."""
        listed = None if slots is None else list(slots)
        return self._add("error", code=code, message=message, status=status, slots=listed)

    def resource_in_use(self, message: str = "Another active subscription exists for this consumer.") -> Fault:
        return self._add("error", code="ResourceInUseException", message=message, status=400)

    def delay(self, seconds: float) -> Fault:
        return self._add("delay", seconds=seconds)

    def time_out(self) -> Fault:
        """The call takes effect and no answer ever comes."""
        return self._add("time_out")

    def lose_response(self) -> Fault:
        """The call takes effect and the connection breaks before the answer."""
        return self._add("lose_response")

    def drop(self, *, events: int | None = None) -> Fault:
        """The connection breaks before the call is done; a subscription, after so many events."""
        return self._add("drop", events=events)

    def half_open(self) -> Fault:
        """The call is not done, the connection stays, nothing comes."""
        return self._add("half_open")

    def expire_iterator(self) -> Fault:
        return self._add("expire_iterator")

    def fall_silent(self, *, events: int = 0) -> Fault:
        """A subscription that is accepted and, after so many events, sends nothing more, not even heartbeats."""
        return self._add("fall_silent", events=events)

    def _add(self, kind: FaultKind, **settings: Any) -> Fault:
        return self._faults.add(Fault(fault=kind, operation=self._operation, stream=self._stream, **settings))


class Faults:
    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self._rules: list[Fault] = []

    def on(self, operation: str = "*", *, stream: str | None = None) -> FaultScript:
        """`operation` is AWS's name of the call, or `*` for every call."""
        return FaultScript(self, operation, stream)

    def add(self, fault: Fault) -> Fault:
        """Rules from JSON come here; the fluent form does it by itself."""
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
        """What happens to this call, which counts for every rule that matches; `slot_count`: a PutRecords' entries."""
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
        """False where the rule found nothing to do in this call."""
        if rule.fault == "delay":
            plan.delay_ms += round(rule.seconds * 1000)
            return True
        if rule.slots is not None or rule.slot_probability is not None:
            slots = self._choose_slots(rule, slot_count)
            plan.refused_slots.update(dict.fromkeys(slots, rule.code or _THROUGHPUT_EXCEEDED))
            return bool(slots)
        if plan.refusal is not None or plan.loss_before is not None or plan.loss_after is not None:
            return False
        if rule.fault in {"throttle", "error", "expire_iterator"}:
            plan.refusal = _refusal(rule, now_ms)
        elif rule.fault in {"fall_silent", "drop"} and rule.events is not None:
            plan.events, plan.loss_after = rule.events, "hang_up" if rule.fault == "drop" else "silence"
        elif rule.fault in {"drop", "half_open"}:
            plan.loss_before = "hang_up" if rule.fault == "drop" else "silence"
        else:
            plan.loss_after = "hang_up" if rule.fault == "lose_response" else "silence"
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
        return LocalError(rule.code or _THROUGHPUT_EXCEEDED, rule.message or "Rate exceeded.", rule.status or 400)
    return LocalError(rule.code or "InternalFailure", rule.message or "Internal Service Failure", rule.status or 500)

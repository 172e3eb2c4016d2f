"""Reads the held shards with enhanced fan-out: the service pushes events, one subscription per shard.

`_core.reading.subscription` decides when a shard subscribes, and what follows the end of a subscription. This module
performs that, with one task per shard. An event is received only when the byte budget has room for it, and accepted in
one step (rules F1, B3). A shard whose subscriptions fail is polled until one succeeds. The session's read position
filters records that both bring.
"""

import asyncio
from dataclasses import dataclass, field
from math import floor
from typing import TypeAlias

from anabranch._core.reading.subscription import (
    FULL_AFTER_MS,
    SILENT_AFTER_MS,
    Outcome,
    Subscription,
    event_reserve_bytes,
    first_at_ms,
    outcome_of,
)
from anabranch._core.session import ReadPage, Session
from anabranch._engine.clock import Alarm, Scheduler
from anabranch._engine.fanout_registration import FanOutRegistration
from anabranch._engine.fleet import Fleet
from anabranch._engine.polling_reader import PollingReader
from anabranch._engine.read_results import READ_ERRORS, ReadError, ReadResults
from anabranch._engine.tasks import start_in_group
from anabranch._ports import Ports, ShardSubscription
from anabranch._wire.messages import SubscribeToShardEvent
from anabranch.budget import Budget
from anabranch.errors import AnabranchError, FanOutError, LeaseStoreError, ServiceError, TransportError
from anabranch.events import FanOutFellBack, FanOutReturned, SubscriptionEnded
from anabranch.limits import MIB
from anabranch.reports import SubscriptionState

PROOF_EVERY_MS = 200
"""How often to look for a heartbeat that proves a lease after a take-over."""
PAUSED_EVERY_MS = 1_000
"""How often to check whether a shard that is paused in the store was resumed."""
EVENT_BYTES_MAX = 2 * MIB
"""What a usual event takes in memory: up to 1 MiB of records, and the overhead of each."""


@dataclass(eq=False, repr=False)
class _SubscribedShard:
    session: Session
    subscription: Subscription
    alarm: Alarm
    """Rings when something changed: there is room, a pause, a declined hand-over."""
    stream: ShardSubscription | None = None
    accepted_ms: int = 0
    made_seconds: float = 0.0
    """The earliest time at which the service can have made the last event, by its clock."""
    is_silent: bool = False
    wanted_bytes: int = 0
    """What the next event needs in the budget."""
    awaits_budget: bool = False
    """Whether the budget will call back when it has room."""
    restart_count: int = 0
    task: asyncio.Task[None] | None = None


@dataclass(eq=False, repr=False)
class FanOutReader:
    _ports: Ports
    _scheduler: Scheduler
    _budget: Budget
    _group: asyncio.TaskGroup
    _fleet: Fleet
    _results: ReadResults
    _registration: FanOutRegistration
    _polling: PollingReader
    _shards: dict[Session, _SubscribedShard] = field(default_factory=dict)
    _last_first_ms: int | None = None
    """The latest time that was given to the first subscription of a shard."""
    is_paused: bool = False

    # what the run asks for

    def add(self, session: Session) -> None:
        now_ms = self._ports.clock.now_ms()
        name = self._registration.of(session.key.stream_key).name
        due_at_ms = first_at_ms(now_ms, self._last_first_ms, self._ports.entropy)
        self._last_first_ms = max(due_at_ms, self._last_first_ms or 0)
        shard = _SubscribedShard(session, Subscription(name, due_at_ms), Alarm(self._ports.clock))
        shard.task = start_in_group(self._group, self._read(shard), f"subscription {session.shard_id}")
        if shard.task is not None:
            self._shards[session] = shard

    def remove(self, session: Session) -> None:
        """Ends the subscription at once: the next owner may subscribe now."""
        shard = self._shards.pop(session, None)
        self._polling.remove(session)
        if shard is not None and shard.task is not None:
            self._interrupt(shard)
            shard.task.cancel()

    def wake(self, session: Session) -> None:
        shard = self._shards.get(session)
        if shard is not None:
            shard.alarm.ring()
        self._polling.wake(session)

    def pause(self) -> None:
        self.is_paused = True
        self._polling.pause()
        for shard in self._shards.values():
            self._interrupt(shard)
            shard.alarm.ring()

    def resume(self) -> None:
        self.is_paused = False
        self._polling.resume()
        for shard in self._shards.values():
            shard.alarm.ring()

    def subscription_of(self, session: Session) -> SubscriptionState | None:
        shard = self._shards.get(session)
        if shard is None:
            return None
        now_ms, subscription = self._ports.clock.now_ms(), shard.subscription
        since_ms, event_ms = subscription.since_ms, subscription.event_at_ms
        return SubscriptionState(
            state=subscription.state,
            seconds=None if since_ms is None else (now_ms - since_ms) / 1000,
            renewal_count=subscription.renewal_count,
            event_seconds_ago=None if event_ms is None else (now_ms - event_ms) / 1000,
            reason=subscription.reason,
        )

    def _interrupt(self, shard: _SubscribedShard, *, silent: bool = False) -> None:
        """Closes the subscription. The shard's task notices, because the stream raises an error."""
        if shard.stream is not None:
            shard.stream.close(silent=silent)

    # one shard

    async def _read(self, shard: _SubscribedShard) -> None:
        while shard.subscription.state != "ended":
            try:
                await self._go_on(shard)
            except (AnabranchError, asyncio.CancelledError):
                raise  # the consumer is stopping, or the shard was removed
            except Exception as error:  # noqa: BLE001 -- P7: restarted three times, then it ends the consumer
                shard.restart_count += 1
                self._results.report_restart(shard.session, error, shard.restart_count)
                self._end(shard, TransportError(f"an unexpected {type(error).__name__}: {error}"))

    async def _go_on(self, shard: _SubscribedShard) -> None:
        subscription, now_ms = shard.subscription, self._ports.clock.now_ms()
        if shard.session.end is not None:
            subscription.finish()
            self._polling.remove(shard.session)
        elif not self._may_read(shard):
            subscription.close()
            self._polling.remove(shard.session)
            await shard.alarm.wait(now_ms + PAUSED_EVERY_MS if shard.session.row.paused else None)
        elif subscription.state == "closed":
            subscription.open(now_ms)
        elif subscription.state == "taken_over":
            if subscription.prove(self._fleet.acknowledged_at_ms, now_ms):
                self._apply(shard)
            else:
                await shard.alarm.wait(now_ms + PROOF_EVERY_MS)
        elif subscription.state == "full":
            while self._may_read(shard) and not self._has_room(shard):
                await self._await_change(shard, None)
            shard.session.begin_read()
            subscription.find_room(self._ports.clock.now_ms())
        elif now_ms < subscription.due_at_ms:
            await shard.alarm.wait(subscription.due_at_ms)
        else:
            await self._subscribe(shard)

    def _may_read(self, shard: _SubscribedShard) -> bool:
        session = shard.session
        return session.state == "reading" and not self.is_paused and not session.row.paused

    async def _subscribe(self, shard: _SubscribedShard) -> None:
        session, subscription, clock = shard.session, shard.subscription, self._ports.clock
        consumer = self._registration.of(session.key.stream_key)
        subscription.begin(clock.now_ms())
        position = subscription.starting_position(
            session.read_after, session.starting_position(), session.checkpoint_position()
        )
        error: ReadError | None = None
        try:
            shard.stream = await self._ports.kinesis.subscribe_to_shard(consumer.arn, session.shard_id, position)
            shard.accepted_ms, shard.is_silent = clock.now_ms(), False
            shard.made_seconds = shard.stream.server_seconds or 0.0
            was_polled = subscription.is_polled
            subscription.accept(clock.now_ms())
            self._watch(shard, shard.stream)
            if was_polled:
                self._polling.remove(session)
                self._ports.emit(FanOutReturned(**session.names))
            await self._receive(shard, shard.stream)
        except READ_ERRORS as raised:
            error = raised
        finally:
            stream, shard.stream = shard.stream, None
            if stream is not None:
                stream.close(silent=shard.is_silent)
        if subscription.state in {"full", "ended"}:
            return
        self._end(shard, error)
        if isinstance(error, ServiceError):
            await self._repair(shard, error)

    def _watch(self, shard: _SubscribedShard, stream: ShardSubscription) -> None:
        """Closes the subscription if it was silent for too long; otherwise checks again later (rule F7)."""
        if shard.stream is not stream:
            return
        silent_at_ms, now_ms = shard.subscription.silent_at_ms, self._ports.clock.now_ms()
        if silent_at_ms is not None and now_ms >= silent_at_ms:
            shard.is_silent = True
            self._interrupt(shard, silent=True)
        else:
            at_ms = now_ms + FULL_AFTER_MS if silent_at_ms is None else silent_at_ms
            self._scheduler.call_at(at_ms, lambda: self._watch(shard, stream))

    # events

    async def _receive(self, shard: _SubscribedShard, stream: ShardSubscription) -> None:
        """Returns when the subscription or the shard has ended, there is no room, or it may not be read any more."""
        while (event_bytes := await stream.next_bytes()) is not None and self._may_read(shard):
            shard.wanted_bytes = event_reserve_bytes(event_bytes)
            if not await self._reserve(shard):
                if self._may_read(shard):
                    shard.subscription.fill()
                return
            if not await self._receive_one(shard, stream):
                return

    async def _receive_one(self, shard: _SubscribedShard, stream: ShardSubscription) -> bool:
        """False if it was the last event. On return, only the session refers to it, so its bytes can be freed."""
        session, reserved = shard.session, shard.wanted_bytes
        try:
            event = await self._results.traced("SubscribeToShard", session, stream.receive())
            if event is None:
                return True
            page = self._page(shard, event)
            await self._results.check(session, page)
            if not session.is_live:
                return False
            given, reserved = reserved, 0
            self._accept(shard, page, event, given)
        finally:
            self._budget.release(reserved)
        if page.is_end:
            shard.subscription.finish()
        return not page.is_end and not _is_too_old(session, page)

    def _page(self, shard: _SubscribedShard, event: SubscribeToShardEvent) -> ReadPage:
        """An event does not say when the service made it: after its last record arrived and the subscription was
        accepted, but maybe long ago, if this process was suspended. We know the service's clock to the second. So the
        time of the event is rounded down, and the present time, which decides what may be trimmed, is rounded up.
        """
        clock, stream = self._ports.clock, shard.stream
        began_seconds = None if stream is None else stream.server_seconds
        if event.records:
            behind_seconds = (event.millis_behind_latest or 0) / 1000
            made_seconds = floor(event.records[-1].arrival_seconds + behind_seconds)
            shard.made_seconds = max(shard.made_seconds, made_seconds)
        elapsed_ms = clock.now_ms() - shard.accepted_ms
        return ReadPage(
            event.records,
            clock.wall_ms() / 1000 if began_seconds is None else began_seconds + 1 + elapsed_ms / 1000,
            event.millis_behind_latest,
            event.continuation_sequence_number is None,
            event.child_shards,
            shard.made_seconds,
        )

    def _accept(self, shard: _SubscribedShard, page: ReadPage, event: SubscribeToShardEvent, reserved: int) -> None:
        """One step: the records, the read position and the continuation (rule F1)."""
        self._results.accept(shard.session, page, reserved)
        shard.subscription.receive(event.continuation_sequence_number, self._ports.clock.now_ms())
        shard.restart_count = 0

    # room

    async def _reserve(self, shard: _SubscribedShard) -> bool:
        """Reserves what the next event needs. False if there was no room for too long, or the shard may not be read."""
        session, subscription, clock = shard.session, shard.subscription, self._ports.clock
        if self._has_room(shard) and self._budget.try_reserve(shard.wanted_bytes):
            return True
        subscription.hold()
        deadline_ms = clock.now_ms() + FULL_AFTER_MS
        while self._may_read(shard) and clock.now_ms() < deadline_ms:
            await self._await_change(shard, deadline_ms)
            if self._has_room(shard) and self._budget.try_reserve(shard.wanted_bytes):
                session.begin_read()
                subscription.listen(clock.now_ms())
                return True
        return False

    def _has_room(self, shard: _SubscribedShard) -> bool:
        return shard.session.busy_bytes < self._results.busy_bytes_max(EVENT_BYTES_MAX) and self._budget.has_room(
            shard.wanted_bytes
        )

    async def _await_change(self, shard: _SubscribedShard, until_ms: int | None) -> None:
        session = shard.session
        if not self._budget.has_room(shard.wanted_bytes):
            if session.budget_full_since_ms is None:
                self._results.wait_for_budget(session)
            if not shard.awaits_budget:
                shard.awaits_budget = True
                self._budget.call_when_free(shard.wanted_bytes, lambda: self._on_budget_freed(shard))
        else:
            self._results.pause_if_full(session, EVENT_BYTES_MAX)
        await shard.alarm.wait(until_ms)

    def _on_budget_freed(self, shard: _SubscribedShard) -> None:
        shard.awaits_budget = False
        shard.alarm.ring()

    # the end of a subscription

    def _end(self, shard: _SubscribedShard, error: ReadError | None) -> None:
        """`error`: None if the subscription expired."""
        subscription, clock = shard.subscription, self._ports.clock
        if not self._may_read(shard):
            return  # it was closed on purpose
        if subscription.state not in {"subscribing", "probing", "active"}:
            return
        if shard.is_silent:
            error = TransportError(f"no event came for {SILENT_AFTER_MS // 1000} s: the connection is dead")
        outcome: Outcome = "expired" if error is None else "silent" if shard.is_silent else outcome_of(error)
        text = "it ended without an event" if error is None else str(error)
        subscription.end(outcome, text, clock.now_ms(), self._ports.entropy)
        if error is not None or subscription.reason is not None:
            self._report(shard, outcome, text, error)
        self._apply(shard)

    def _report(self, shard: _SubscribedShard, outcome: Outcome, text: str, error: ReadError | None) -> None:
        """A shard that is polled meanwhile is not stalled, so only an event says why it is not subscribed."""
        session, subscription = shard.session, shard.subscription
        failures = max(1, subscription.failure_count)
        if subscription.is_polled and outcome == "in_use":
            return
        if not subscription.is_polled and subscription.reason is not None:
            session.report(subscription.reason)
            if error is not None and outcome in {"broken", "silent", "failed", "key_denied"}:
                self._results.report(session, error, failures)
                return
        if failures & (failures - 1) == 0:  # reports the 1st, 2nd, 4th, 8th, ...
            self._ports.emit(SubscriptionEnded(**session.names, error=text, failure_count=failures))

    def _apply(self, shard: _SubscribedShard) -> None:
        """Polls the shard if its subscriptions fail (rule F2)."""
        session, subscription = shard.session, shard.subscription
        if not subscription.is_polled or subscription.reason is None:
            return
        if not self._polling.has(session):
            reason = subscription.reason
            self._ports.emit(FanOutFellBack(**session.names, reason=reason))
        self._polling.add(session, subscription.reason)

    async def _repair(self, shard: _SubscribedShard, error: ServiceError) -> None:
        """The service no longer knows the consumer, the shard or the position: finds out which one is gone."""
        is_missing = outcome_of(error) == "missing"
        if not (is_missing or shard.subscription.positions_are_used_up) or not self._may_read(shard):
            return
        unanswered = await self._results.check_what_is_gone(shard.session, error)
        if unanswered is not None or shard.session.end is not None or not is_missing:
            return
        stream_key = shard.session.key.stream_key
        known = self._registration.of(stream_key)
        try:
            await self._registration.check(stream_key)
        except (*READ_ERRORS, LeaseStoreError, FanOutError):
            return  # the next subscription fails in the same way, and tries again
        if self._registration.of(stream_key) != known:
            shard.subscription.subscribe_soon(self._ports.clock.now_ms())


Reader: TypeAlias = PollingReader | FanOutReader
"""Fills the sessions that were added with pages."""


def _is_too_old(session: Session, page: ReadPage) -> bool:
    """Whether `until` has passed, but this event may be older. A new subscription proves what was read until then."""
    until_seconds = session.unpacker.until_seconds
    if until_seconds is None or page.made_seconds is None:
        return False
    return page.is_last and page.made_seconds < until_seconds <= page.server_seconds

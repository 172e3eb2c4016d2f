"""Time, processes, the store, and the network between them.

Events happen in true time, which only the world knows. A process has clocks that err and stop, and pauses. The store is
linearizable, with what real ones do on bad days: reads that lag, roll-backs, loss. Messages get lost, late and
repeated, or do not pass at all.
"""

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final, Literal

from anabranch._core.leases.store_calls import NoAnswer
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import AppRow, Conflict, LeaseKey, LeaseRow, MemberRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard
from anabranch.limits import HASH_KEY_MAX
from anabranch.stores.row_store import Changed, Found, Row, RowKey, RowLeaseStore, Scope, Update
from protocol.faults import Dice, WorldOptions


class Agenda:
    """Events run in the order of their times; those of one time in the order in which they were noted."""

    __slots__ = ("_events", "_noted", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0
        self._events: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._noted = 0

    def at(self, time_ms: int, action: Callable[..., Any], *arguments: Any) -> None:
        """At a time that has not passed yet."""
        self._noted += 1
        heappush(self._events, (time_ms, self._noted, action, arguments))

    def after(self, delay_ms: int, action: Callable[..., Any], *arguments: Any) -> None:
        self._noted += 1
        heappush(self._events, (self.now_ms + delay_ms, self._noted, action, arguments))

    def run_until(self, end_ms: int) -> int:
        """How many events ran."""
        events = self._events
        count = 0
        while events and events[0][0] <= end_ms:
            self.now_ms, _, action, arguments = heappop(events)
            action(*arguments)
            count += 1
        self.now_ms = end_ms
        return count


Lane = Literal["heart", "main"]


class Process:
    def __init__(self, agenda: Agenda, *, rate_ppm: int = 0, offset_ms: int = 0, clock_stops: bool = False) -> None:
        self.alive = True
        self._agenda = agenda
        self._rate = 1_000_000 + rate_ppm
        self._offset_ms = offset_ms
        self._clock_stops = clock_stops
        self._stood_still_ms = 0
        self._paused_until_ms = 0
        self._main_resumes_ms = 0
        """When the main lane runs again: it waits for pauses and for stalls."""
        self._lanes: dict[Lane, Callable[..., None]] = {"heart": self._heart, "main": self._main}

    def now_ms(self) -> int:
        return (self._agenda.now_ms - self._stood_still_ms) * self._rate // 1_000_000 + self._offset_ms

    def wall_ms(self) -> int:
        """True time with an offset of its own: NTP keeps the wall clock's rate, and suspending does not stop it."""
        return self._agenda.now_ms + 1_700_000_000_000 + self._offset_ms

    def true_ms(self) -> int:
        """What no process can know: for the journal only."""
        return self._agenda.now_ms

    def at(self, due_ms: int, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action when the process's own clock shows `due_ms`, and the process runs."""
        self.after(max(0, due_ms - self.now_ms()), lane, action, *arguments)

    def after(self, delay_ms: int, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """The same, so long from now on the process's own clock."""
        if self._clock_stops:
            arguments = (self.now_ms() + delay_ms, lane, action, arguments)
            action = self._if_due
        true_delay_ms = -(-delay_ms * 1_000_000 // self._rate)
        self._agenda.after(true_delay_ms, self._lanes[lane], action, arguments)

    def deliver(self, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action as soon as the process runs and has done what it does now."""
        self._agenda.after(0, self._lanes[lane], action, arguments)

    def receive(self, lane: Lane, action: Callable[..., Any], *arguments: Any) -> None:
        """Runs the action now, or as soon as the process runs: something has come in from outside."""
        self._lanes[lane](action, arguments)

    def pause(self, duration_ms: int) -> None:
        until_ms = self._agenda.now_ms + duration_ms
        if self._clock_stops:
            self._stood_still_ms += max(0, until_ms - max(self._paused_until_ms, self._agenda.now_ms))
        self._paused_until_ms = max(self._paused_until_ms, until_ms)
        self.stall(duration_ms)

    def stall(self, duration_ms: int) -> None:
        self._main_resumes_ms = max(self._main_resumes_ms, self._agenda.now_ms + duration_ms)

    def kill(self) -> None:
        self.alive = False

    def _main(self, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._agenda.now_ms < self._main_resumes_ms:
            self._agenda.at(self._main_resumes_ms, self._main, action, arguments)
        elif self.alive:
            action(*arguments)

    def _heart(self, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self._agenda.now_ms < self._paused_until_ms:
            self._agenda.at(self._paused_until_ms, self._heart, action, arguments)
        elif self.alive:
            action(*arguments)

    def _if_due(self, due_ms: int, lane: Lane, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A timer of a clock that stood still meanwhile runs later."""
        if self.now_ms() < due_ms:
            self.at(due_ms, lane, action, *arguments)
        else:
            action(*arguments)


STREAMS = tuple(
    StreamRow(stream_key=f"1:{name}:1", name=name, arn=name, created_seconds=1.0, origin=TRIM_HORIZON)
    for name in ("orders", "payments")
)


def streams_of(index: int, stream_count: int) -> tuple[str, ...]:
    """The keys of the streams that worker number `index` reads."""
    keys = tuple(row.stream_key for row in STREAMS[:stream_count])
    return keys if index % 3 == 0 or stream_count == 1 else (keys[index % 3 - 1],)


def _shards(stream_number: int, lease_count: int, stream_count: int) -> list[Shard]:
    numbers = range(stream_number, lease_count, stream_count) or [stream_number]
    ends = [HASH_KEY_MAX * part // len(numbers) for part in range(1, len(numbers) + 1)]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [
        Shard(shard_id=f"shardId-{number:012}", hash_key_range=HashKeyRange(start, end), starting_sequence_number=0)
        for number, start, end in zip(numbers, starts, ends, strict=True)
    ]


class Storage:
    """The rows behind all handles of the store."""

    def __init__(self, lease_count: int, stream_count: int = 1, *, keeps_history: bool = False) -> None:
        self.now_ms = 0
        self.lag_ms = 0
        """How old the members and leases are that the present call reads."""
        self.name = "storage-0"
        self.rows: dict[RowKey, Row] = {}
        self.is_away = False
        self.takes = 0
        self.seals = 0
        self.gifts = 0
        """Leases that their owner gave to another member."""
        self.shards = {
            stream.stream_key: _shards(number, lease_count, stream_count)
            for number, stream in enumerate(STREAMS[:stream_count])
        }
        """Of each stream, by its key. They never change."""
        self._keeps_history = keeps_history
        self._history: list[dict[RowKey, Row]] = []
        self._ended_ms: list[int] = []
        """Until when each snapshot of the history was the present."""

    def get(self, key: RowKey) -> Row | None:
        return self._seen(key.kind).get(key)

    def read(self, scope: Scope) -> list[Row]:
        place = (scope.kind, scope.app, scope.app_id)
        return [row for key, row in self._seen(scope.kind).items() if key[:3] == place and scope.includes(row)]

    def _seen(self, kind: str) -> dict[RowKey, Row]:
        lags = self.lag_ms and kind in {"member", "lease"}
        return self._as_of(self.now_ms - self.lag_ms) if lags else self.rows

    def put(self, key: RowKey, row: Row | None) -> None:
        if self._keeps_history:
            self._history.append(dict(self.rows))
            self._ended_ms.append(self.now_ms)
        if row is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = row

    @property
    def app(self) -> AppRow | None:
        return next((row for row in self.rows.values() if isinstance(row, AppRow)), None)

    def lease(self, app_id: str, key: LeaseKey) -> LeaseRow | None:
        row = self.rows.get(RowKey("lease", "billing", app_id, (key.stream_key, key.generation, key.shard_id)))
        return row if isinstance(row, LeaseRow) else None

    def lease_keys(self, stream_key: str) -> list[LeaseKey]:
        """Of all leases that the stream must have."""
        return [LeaseKey(stream_key, 0, shard.shard_id) for shard in self.shards[stream_key]]

    # bad days

    def remove_member(self, member_id: str) -> None:
        for key in [key for key in self.rows if key.kind == "member" and key.name == (member_id,)]:
            self.put(key, None)

    def roll_back(self, by_ms: int) -> None:
        """Forgets what was written in the last `by_ms`, as a replica that took over, and is another storage now."""
        self.rows = dict(self._as_of(self.now_ms - by_ms))
        self._become_another()

    def reset(self) -> None:
        self.rows = {}
        self._become_another()

    def _become_another(self) -> None:
        self._history.clear()
        self._ended_ms.clear()
        name, _, number = self.name.partition("-")
        self.name = f"{name}-{int(number) + 1}"

    def _as_of(self, time_ms: int) -> dict[RowKey, Row]:
        index = bisect_right(self._ended_ms, time_ms)
        return self.rows if index == len(self._history) else self._history[index]


class ProtocolStore(RowLeaseStore):
    """One process's handle. Calls take effect at once; whether and when they arrive is the network's business."""

    def __init__(self, storage: Storage, app_id: str | None = None) -> None:
        super().__init__("billing")
        self._storage = storage
        self._app_id = app_id

    async def identity(self) -> str:
        return self._storage.name

    async def get(self, keys: Sequence[RowKey]) -> Found:
        return Found([self._storage.get(key) for key in keys], self._storage.name)

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        return Found([row for scope in scopes for row in self._storage.read(scope)], self._storage.name)

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        before = [self._storage.rows.get(key) for key in keys]
        after = update(before)
        for key, old, new in zip(keys, before, after, strict=True):
            if new is not old:
                self._storage.put(key, new)
        return Changed(before, after, self._storage.name)

    async def close(self) -> None:
        """The rows stay."""

    # what verdicts count

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        row = await super().seal_member(member_id, observed_counter)
        self._storage.seals += row is not None and row.state == "sealed"
        return row

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        answer = await super().take_lease(
            key,
            member_id,
            expected_owner=expected_owner,
            expected_version=expected_version,
            epoch_floor=epoch_floor,
        )
        self._storage.takes += not isinstance(answer, Conflict)
        return answer

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        answer = await super().write_lease(row, member_id=member_id, expected_version=expected_version)
        self._storage.gifts += not isinstance(answer, Conflict) and answer.owner not in {None, member_id}
        return answer


def at_once(answer: Awaitable[Any]) -> Any:
    """What a coroutine returns that never waits."""
    try:
        answer.send(None)  # type: ignore[attr-defined]
    except StopIteration as done:
        return done.value
    raise AssertionError("a call of the simulated store waits")


_PROMPT_MS = 30
_LATE = (0.15, 1.4)
"""In expiries."""


_LOST: Final = NoAnswer("no answer in time")
_FAILED_OVER: Final = NoAnswer("the connection was lost: the store has failed over")


class _Call:
    __slots__ = ("answered", "begun_ms", "deadline_ms", "done", "lane", "request")

    def __init__(
        self, lane: Lane, begun_ms: int, deadline_ms: int, request: Callable[[], Any], done: Callable[[Any], None]
    ) -> None:
        self.lane = lane
        self.begun_ms = begun_ms
        self.deadline_ms = deadline_ms
        self.request = request
        self.done = done
        self.answered = False


class Link:
    """One process's two connections to the store. A call is answered once, or given up by its caller at its deadline;
    giving up does not take the request back. A request that reaches another storage than the one its connection was
    made to has no effect: its sender gets an error and connects again.
    """

    def __init__(self, agenda: Agenda, storage: Storage, process: Process, options: WorldOptions, dice: Dice) -> None:
        self.cut_until_ms = 0
        self.calm = False
        """Whether the faults are over."""
        self._storages: dict[Lane, str] = dict.fromkeys(("heart", "main"), storage.name)
        """The storage that each lane's own connection was made to."""
        self._agenda = agenda
        self._storage = storage
        self._process = process
        self._dice = dice
        self._lost = options.lost
        self._late_ms = options.expiries(*_LATE)
        self._late_above = 1 - options.late
        self._repeated = options.repeated
        self._lag_ms_max = options.lag_ms_max
        self._lag_phase_ms = dice.between(0, 60_000)

    def calm_down(self) -> None:
        """The faults are over; messages on their way stay as they are."""
        self.calm = True
        self.cut_until_ms = 0
        self._lost, self._late_above, self._repeated, self._lag_ms_max = 0.0, 1.0, 0.0, 0

    def call(self, lane: Lane, deadline_ms: int, request: Callable[[], Any], done: Callable[[Any], None]) -> None:
        call = _Call(lane, self._process.now_ms(), deadline_ms, request, done)
        self._send(call, self._arrive, call, self._storages[lane])
        if self._repeated and self._dice.random() < self._repeated:
            self._agenda.after(self._dice.between(1, 5_000), self._arrive, call, self._storages[lane])

    def _lag_ms(self) -> int:
        """How old the next read is: its replica stands still for a while, then catches up at once, again and again."""
        limit_ms = self._lag_ms_max
        return (self._agenda.now_ms + self._lag_phase_ms) % limit_ms if limit_ms else 0

    def _send(self, call: _Call, arrive: Callable[..., None], *arguments: Any) -> None:
        """One message of a call, there or back. Only where one does not come in time does the caller's deadline matter:
        most calls need no timer.
        """
        if self._agenda.now_ms < self.cut_until_ms:
            self._wait_in_vain(call)
            return
        fate = self._dice.random()
        delay_ms = 1 + int(fate * _PROMPT_MS)
        if fate < self._lost:
            self._wait_in_vain(call)
            return
        if fate > self._late_above:
            delay_ms = self._dice.between(*self._late_ms)
            self._wait_in_vain(call)
        self._agenda.after(delay_ms, arrive, *arguments)

    def _arrive(self, call: _Call, storage: str) -> None:
        here = self._storage
        if self._agenda.now_ms < self.cut_until_ms or here.is_away:
            self._wait_in_vain(call)
            return
        here.now_ms, here.lag_ms = self._agenda.now_ms, self._lag_ms()
        answer = call.request() if storage == here.name else _FAILED_OVER
        self._send(call, self._return, call, answer)

    def _return(self, call: _Call, answer: Any) -> None:
        if self._agenda.now_ms < self.cut_until_ms:
            self._wait_in_vain(call)
        else:
            self._process.receive(call.lane, self._answer, call, answer)

    def _answer(self, call: _Call, answer: Any) -> None:
        if not call.answered:
            call.answered = True
            if answer is _FAILED_OVER:
                self._storages[call.lane] = self._storage.name
            call.done(answer)

    def _wait_in_vain(self, call: _Call) -> None:
        """A message was lost or is late: the caller may give up, at its deadline."""
        if not call.answered:
            self._process.at(call.begun_ms + call.deadline_ms, call.lane, self._give_up, call)

    def _give_up(self, call: _Call) -> None:
        if not call.answered:
            call.answered = True
            call.done(_LOST)

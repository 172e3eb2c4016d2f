"""The store calls of the lease machine, one after another. Each answer comes with its time.

The base of `LeaseMachine`. It repeats calls without an answer, counts failures, checks that the store still has the
application, and begins its streams: the row of a stream, its root leases, then the mark that they are complete (rule
S2). Any worker can complete a stream, and no worker reads records before that. In a store that was emptied or replaced
nothing is created, and the worker ends (rule L14). Before each attempt to set the mark, a read verifies that every root
lease exists: a store that failed over may have lost acknowledged writes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from msgspec.structs import replace

from anabranch._core.backoff import backoff_ms
from anabranch._core.leases import store_calls as calls
from anabranch._core.leases.store_calls import Moment, NoAnswer, Steps, StoreCall
from anabranch._core.shards.lifecycle import IncompleteListing, listing_filter, plan_bootstrap
from anabranch._model.entropy import Entropy
from anabranch._model.leases import AppRow, LeaseRow, StreamRow
from anabranch._model.streams import Shard
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError, TransportError
from anabranch.events import StoreAnswered, StoreReset, StoreUnanswered, StreamChanged

T = TypeVar("T")

RETRY_MS: Final = 500
THROTTLED_RETRY_MS_MAX: Final = 8_000
TRIES_MAX: Final = 60
FAILURES_REPORTED_MIN: Final = 2
"""Failures are reported from this many in a row on. A single one may be chance."""
LISTINGS_MAX: Final = 20
LISTING_RETRY_MS: Final = 500
CHECK_MS_MAX: Final = 10_000
"""A check that took longer says nothing about the present."""
CREATED_TOGETHER_MAX: Final = 200
"""How many root leases a worker creates before it looks again. A hundred workers create thousands in one pass."""


class StoreDialogue:
    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy
        self.app = AppRow(app="", app_id="", created_wall_ms=0)
        """The application's row, as it was when it was opened."""
        self.trouble: NoAnswer | None = None
        """Why the last store call had no answer; None if it had one."""
        self.moment = Moment(0, 0)
        """The present time. The driver sets it before each operation; then each answer brings it."""
        self._changes: list[Any] = []
        self._failure_count = 0
        """Store calls without an answer. After one, the next call may reach another storage (rule L13)."""
        self.root_count = 0
        """How many leases the stream had when it began here."""

    def ask(self, call: StoreCall[T]) -> Steps[T | NoAnswer]:
        """From outside: only a read, or a write whose outcome no lease depends on."""
        try:
            answer = yield call
        except BaseException:
            self._failure_count += 1  # cancelled, or a permanent error: the call may have taken effect
            raise
        self.moment = answer.moment
        value: T | NoAnswer = answer.value
        if isinstance(value, NoAnswer):
            self._failure_count += 1
            self.trouble = value
        else:
            self.trouble = None
        return value

    def _ask_until_answered(self, call: StoreCall[T]) -> Steps[T]:
        """The answer of the first try that has one. An unreachable store delays a start, which gives up in the end."""
        return (yield from self._repeat(lambda: self.ask(call)))

    def _repeat(self, attempt: Callable[[], Steps[T | NoAnswer]]) -> Steps[T]:
        """The result of the first attempt in which every call has an answer."""
        began_ms = self.moment.now_ms
        for tries in range(1, TRIES_MAX + 1):
            result = yield from attempt()
            if not isinstance(result, NoAnswer):
                if tries > FAILURES_REPORTED_MIN:
                    seconds = (self.moment.now_ms - began_ms) / 1000
                    self._changes.append(StoreAnswered(failure_count=tries - 1, seconds=seconds))
                return result
            self._report_unanswered(tries)
            pause_ms = RETRY_MS
            if self.trouble is not None and self.trouble.code == "throttled":
                # Workers that start together throttle each other, so their pauses grow and differ.
                pause_ms = backoff_ms(
                    tries, self._entropy, first_ms=RETRY_MS, max_ms=THROTTLED_RETRY_MS_MAX, min_share=0.5
                )
            yield from self._wait(pause_ms)
        assert self.trouble is not None
        raise LeaseStoreError(f"{self.trouble.error}, {TRIES_MAX} times in a row", code=self.trouble.code)

    def _wait(self, duration_ms: int, *, wakeable: bool = False) -> Steps[None]:
        self.moment = (yield calls.Wait(self.moment.now_ms + duration_ms, wakeable=wakeable)).moment

    def _report_unanswered(self, failures: int) -> None:
        """From the second failure on, then less and less often."""
        if failures >= FAILURES_REPORTED_MIN and failures & (failures - 1) == 0:
            assert self.trouble is not None
            error, code = self.trouble.error, self.trouble.code
            self._changes.append(StoreUnanswered(error=error, code=code, failure_count=failures))

    # the application

    def _find_app(self) -> Steps[AppRow | NoAnswer]:
        """Raises if the application is gone, or another is in its place (rule L14)."""
        app = yield from self.ask(calls.ReadApp())
        return app if isinstance(app, NoAnswer) else self._recognise(app)

    def _recognise(self, app: AppRow | None) -> AppRow:
        if app is None or app.app_id != self.app.app_id:
            self.raise_store_reset()
        return self._check_place(app)

    def _check_place(self, app: AppRow) -> AppRow:
        """Raises unless the application lives in this store. A copy and a start may run at the same time: each checks
        this after its own write.
        """
        if app.place == "moved":
            raise LeaseStoreInvalidError(
                f"application {app.app!r} was moved to {app.other_url}",
                code="moved",
                advice="name that store in leases=",
            )
        if app.place != "here":
            way = "moved to" if app.place == "leaving" else "copied here from"
            raise LeaseStoreInvalidError(
                f"application {app.app!r} is being {way} {app.other_url}, and the copy is not complete",
                code="moved",
                advice="repeat `anabranch apps copy`",
            )
        return app

    def raise_store_reset(self) -> NoReturn:
        """The application is gone from the store, or is another one. Nothing is created in its place (rule L14)."""
        self._changes.append(StoreReset())
        raise LeaseStoreInvalidError(
            f"the lease store no longer holds application {self.app.app!r} as this worker knows it: it was "
            "emptied, restored or replaced. Nothing was created in its place; check the store, then start again."
        )

    # the streams

    def begin_stream(self, proposal: StreamRow) -> Steps[StreamRow]:
        """Returns the stream's row once all its root leases exist, no matter who created them."""
        self._report_if_recreated(proposal, (yield from self._ask_until_answered(calls.ReadStreams())))
        row = yield from self._put_stream(proposal)
        while True:
            begun = yield from (self._confirm(row) if row.bootstrapped else self._complete(row))
            if begun is not None:
                return begun
            believed = row
            row = yield from self._put_stream(replace(row, bootstrapped=False, version=0))
            if believed == row and row.bootstrapped:
                raise LeaseStoreInvalidError(
                    f"application {self.app.app!r} has already read stream {row.name}, but the lease store has no "
                    "leases for it: they were deleted. Nothing was created, because that would handle everything from "
                    "the start position again. Restore the store, or start over after "
                    f"`anabranch apps delete {self.app.app}`"
                )

    def lease_rows(self, row: StreamRow) -> Steps[list[LeaseRow]]:
        """All lease rows of this stream and generation, finished ones included."""
        rows = _of(row, (yield from self._ask_until_answered(calls.ReadLeases(with_finished=True))))
        self.root_count = len(rows)
        return rows

    def _report_if_recreated(self, proposal: StreamRow, streams: Sequence[StreamRow]) -> None:
        known = [row for row in streams if row.arn == proposal.arn]
        if known and all(row.stream_key != proposal.stream_key for row in known):
            self._changes.append(
                StreamChanged(
                    stream=proposal.name,
                    change="the stream was deleted and created again since this application last read it: "
                    "the new stream is read from start=; the checkpoints of the old one are kept but not used",
                )
            )

    def _put_stream(self, row: StreamRow) -> Steps[StreamRow]:
        """Returns the row that the store has now."""
        yield from self._repeat(self._find_app)
        return (yield from self._ask_until_answered(calls.PutStream(row)))

    def _confirm(self, row: StreamRow) -> Steps[StreamRow | None]:
        """None if there are no leases: somebody deleted them, because a stream keeps some of its rows (rule S6)."""
        return row if (yield from self.lease_rows(row)) else None

    def _complete(self, row: StreamRow) -> Steps[StreamRow | None]:
        """Creates the root leases in order, then sets the mark. None if another worker did it or the row changed."""
        listing = yield from self._whole_listing(row)
        self.root_count = len(listing)
        while True:
            missing, marked = yield from self._repeat(partial(self._check_and_mark, row, listing))
            if not missing:
                return marked
            for lease in self._own_part(missing):
                if not (yield from self._repeat(partial(self._create_root, row, lease))):
                    return None

    def _own_part(self, missing: tuple[LeaseRow, ...]) -> tuple[LeaseRow, ...]:
        """Workers that start together share the work: each creates some of many leases, then looks again."""
        if len(missing) <= CREATED_TOGETHER_MAX:
            return missing
        first = self._entropy.randrange(0, len(missing))
        return (*missing[first:], *missing[:first])[:CREATED_TOGETHER_MAX]

    def _create_root(self, row: StreamRow, lease: LeaseRow) -> Steps[bool | NoAnswer]:
        """Returns False if the mark is set. Checks that before each attempt: the store may be down between two."""
        if (unmarked := (yield from self._is_unmarked(row))) is not True:
            return unmarked
        created = yield from self.ask(calls.CreateLease(lease))
        return created if isinstance(created, NoAnswer) else True

    def _is_unmarked(self, row: StreamRow) -> Steps[bool | NoAnswer]:
        """Whether the mark is not set yet. If it was set while this worker was stalled, leases that seem to be missing
        may have been finished and removed, or deleted; creating them would handle their records again. So a check
        during which the worker was suspended is repeated.
        """
        while True:
            asked = self.moment
            streams = yield from self.ask(calls.ReadStreams())
            if isinstance(streams, NoAnswer):
                return streams
            app = yield from self._find_app()
            if isinstance(app, NoAnswer):
                return app
            now = self.moment
            if max(now.now_ms - asked.now_ms, now.wall_ms - asked.wall_ms) <= CHECK_MS_MAX:
                return not any(known.stream_key == row.stream_key and known.bootstrapped for known in streams)

    def _check_and_mark(
        self, row: StreamRow, listing: list[Shard]
    ) -> Steps[tuple[tuple[LeaseRow, ...], StreamRow | None] | NoAnswer]:
        """Returns the missing leases, or sets the mark and returns the row."""
        rows = yield from self.ask(calls.ReadLeases(with_finished=True))
        if isinstance(rows, NoAnswer):
            return rows
        missing = plan_bootstrap(row, listing, _of(row, rows))
        assert not isinstance(missing, IncompleteListing), "the same listing was complete"
        if missing:
            return missing, None
        app = yield from self._find_app()
        if isinstance(app, NoAnswer):
            return app
        marked = yield from self.ask(calls.WriteStream(replace(row, bootstrapped=True), row.version))
        return marked if isinstance(marked, NoAnswer) else ((), marked)

    def _whole_listing(self, row: StreamRow) -> Steps[list[Shard]]:
        for _ in range(LISTINGS_MAX):
            answer = yield calls.ListShards(listing_filter(row.origin))
            self.moment = answer.moment
            listing: list[Shard] = answer.value
            plan = plan_bootstrap(row, listing)
            if not isinstance(plan, IncompleteListing):
                return listing
            yield from self._wait(LISTING_RETRY_MS)
        raise TransportError(f"stream {row.name}: {plan}, {LISTINGS_MAX} times in a row")


def _of(stream: StreamRow, rows: Sequence[LeaseRow]) -> list[LeaseRow]:
    return [row for row in rows if (row.key.stream_key, row.key.generation) == (stream.stream_key, stream.generation)]

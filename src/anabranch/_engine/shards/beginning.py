"""How an application begins to read a stream: the stream's row, its root leases, then the mark that they are complete.

Any worker can complete it, and nobody reads before that (rule S2). Every write holds only in the application that this
worker has opened: in a store that was emptied meanwhile, or that another has begun anew, it makes nothing, and the
worker ends (rule L14). Each try of the mark begins with a look that shows every root lease in its place: a store that
failed over since the last one may have gone back in time, and have forgotten some that it had acknowledged.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, TypeVar

from msgspec.structs import replace

from anabranch._core.shards.bootstrap import IncompleteListing, listing_filter, pin, plan_bootstrap
from anabranch._engine.leases.store_calls import insist
from anabranch._engine.leases.store_reset import store_reset
from anabranch._engine.outside import Outside
from anabranch._engine.shards.topology import list_all_shards
from anabranch._model.leases import AppRow, LeaseRow, StreamRow
from anabranch._model.shards import Shard
from anabranch._model.streams import StreamName, parse_stream
from anabranch._wire.messages import StreamSummary
from anabranch.errors import LeaseStoreInvalidError, TransportError
from anabranch.events import StreamChanged

__all__ = ["Beginning", "Start"]

T = TypeVar("T")

Start = Literal["latest", "trim_horizon"] | float
"""`latest`, `trim_horizon`, or a time in seconds since 1970."""

LISTINGS_MAX = 20
RETRY_MS = 500


class Beginning:
    def __init__(
        self, outside: Outside, app: AppRow, start: Start, *, call_deadline_ms: int, start_timeout_ms: int
    ) -> None:
        self._outside = outside
        self._app = app
        self._start = start
        self._call_deadline_ms = call_deadline_ms
        self._start_timeout_ms = start_timeout_ms

    async def begin(self, stream: StreamName, summary: StreamSummary) -> StreamRow:
        """The stream's row once it has all its root leases, whoever made them."""
        row = await self._put(self._proposal(summary))
        while True:
            begun = await self._confirm(row) if row.bootstrapped else await self._complete(stream, row)
            if begun is not None:
                return begun
            believed, row = row, await self._put(replace(row, bootstrapped=False, version=0))
            if believed == row and row.bootstrapped:
                raise LeaseStoreInvalidError(
                    f"stream {row.name} was begun by application {self._app.app!r}, and the lease store has no lease "
                    "of it: they were deleted. Nothing was created in their place, for that would handle everything "
                    "since its beginning again: restore the store, or begin anew after "
                    f"`anabranch apps delete {self._app.app}`"
                )

    async def tell_if_new(self, summary: StreamSummary) -> None:
        outside, key = self._outside, _stream_key(summary)
        known = [row for row in await self._insist(outside.store.read_streams) if row.arn == summary.arn]
        if known and all(row.stream_key != key for row in known):
            outside.emit(
                StreamChanged(
                    stream=summary.name,
                    change="the stream was deleted and created anew since this application last read it: "
                    "the new one starts by start=, and what was known of the old one is kept aside",
                )
            )

    async def lease_rows(self, row: StreamRow) -> list[LeaseRow]:
        """All rows of this stream and generation, finished ones included."""
        return await self._insist(partial(self._read_lease_rows, row))

    async def _read_lease_rows(self, row: StreamRow) -> list[LeaseRow]:
        rows = await self._outside.store.read_leases(with_finished=True)
        return [
            lease for lease in rows if lease.key.stream_key == row.stream_key and lease.key.generation == row.generation
        ]

    def _proposal(self, summary: StreamSummary) -> StreamRow:
        server_seconds = summary.server_seconds or self._outside.clock.wall_ms() / 1000
        return StreamRow(
            stream_key=_stream_key(summary),
            name=summary.name,
            arn=summary.arn,
            created_seconds=summary.created_seconds,
            origin=pin(self._start, server_seconds=server_seconds, created_seconds=summary.created_seconds),
        )

    async def _put(self, row: StreamRow) -> StreamRow:
        """The row that stands."""
        return self._ours(await self._insist(partial(self._outside.store.put_stream, row, app_id=self._app.app_id)))

    async def _confirm(self, row: StreamRow) -> StreamRow | None:
        """A mark is not believed where there is no lease at all: rows are never all removed (rule S6)."""
        return row if await self.lease_rows(row) else None

    async def _complete(self, stream: StreamName, row: StreamRow) -> StreamRow | None:
        """Root leases in the order of creation, then the mark. None: somebody else has done it, or the row is not what
        it was.
        """
        listing = await self._whole_listing(stream, row)
        while True:
            missing, marked = await self._insist(partial(self._look_and_mark, row, listing), calls=2)
            if not missing:
                return marked
            for lease in missing:
                if not await self._insist(partial(self._is_open, row)):
                    return None
                self._ours(
                    await self._insist(partial(self._outside.store.create_lease, lease, app_id=self._app.app_id))
                )

    async def _is_open(self, row: StreamRow) -> bool:
        """Whether nobody has set the mark yet. Where one has, while this worker stood still, what it misses may have
        been handled and cleaned up since, and would begin anew.
        """
        streams = await self._outside.store.read_streams()
        return not any(known.stream_key == row.stream_key and known.bootstrapped for known in streams)

    async def _look_and_mark(
        self, row: StreamRow, listing: list[Shard]
    ) -> tuple[tuple[LeaseRow, ...], StreamRow | None]:
        """What is missing; if nothing is, the row with the mark."""
        missing = plan_bootstrap(row, listing, await self._read_lease_rows(row))
        assert not isinstance(missing, IncompleteListing), "the listing was whole, and is the same"
        if missing:
            return missing, None
        done = replace(row, bootstrapped=True)
        return (), await self._outside.store.write_stream(done, row.version, app_id=self._app.app_id)

    async def _whole_listing(self, stream: StreamName, row: StreamRow) -> list[Shard]:
        outside = self._outside
        for _ in range(LISTINGS_MAX):
            listing = await list_all_shards(
                outside, stream, listing_filter(row.origin), answered_ms=self._start_timeout_ms
            )
            plan = plan_bootstrap(row, listing)
            if not isinstance(plan, IncompleteListing):
                return listing
            await outside.clock.sleep_until_ms(outside.clock.now_ms() + RETRY_MS)
        raise TransportError(f"stream {stream}: {plan}, {LISTINGS_MAX} times in a row")

    def _ours(self, row: T | None) -> T:
        """What was made, or stood already; None from the store: the application is another."""
        if row is None:
            raise store_reset(self._outside, self._app)
        return row

    async def _insist(self, call: Callable[[], Awaitable[T]], *, calls: int = 1) -> T:
        return await insist(self._outside, call, deadline_ms=calls * self._call_deadline_ms)


def _stream_key(summary: StreamSummary) -> str:
    return f"{parse_stream(summary.arn).account_id}:{summary.name}:{int(summary.created_seconds)}"

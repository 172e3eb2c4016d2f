"""`Consumer`: reads streams in order, across resharding, restarts and many workers.

A facade: checks the options, connects the engine (`_engine.consumer_run`) to AWS and a lease store, and decides
nothing.
"""

import asyncio
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self

from anabranch._aws.account import AwsAccount
from anabranch._aws.kinesis_client import KinesisClient, open_kinesis
from anabranch._core.handling.batches import BatchLimits
from anabranch._core.leases.admission import fingerprint
from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.timing import lease_timing
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.clock import SystemClock
from anabranch._engine.consumer_run import ConsumerRun
from anabranch._engine.emit import make_emit
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._engine.iteration import Iteration
from anabranch._engine.ports import Ports
from anabranch._engine.signals import stop_on_signals
from anabranch._engine.stop_conditions import StopConditions
from anabranch._engine.worker import WorkerPlan
from anabranch._model.kinds import type_violations
from anabranch._model.leases import AppRow
from anabranch._model.streams import StreamName, parse_stream
from anabranch._ports import LeaseStore
from anabranch.budget import Budget
from anabranch.config import Aws, ConsumerSettings
from anabranch.errors import ConfigurationError, UsageError
from anabranch.events import Event
from anabranch.policies import Retry
from anabranch.records import Batch, Record
from anabranch.reports import ConsumerStatus, StopReport
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.urls import default_store, open_store
from anabranch.values import Decoder, decode_with

__all__ = ["Consumer"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=bytes)  # without decode= it is a Consumer[bytes]
else:
    from typing import TypeVar

    T = TypeVar("T")


Handler = Callable[..., Any]
Item = TypeVar("Item")


EPHEMERAL = "(ephemeral)"


class Consumer(Generic[T]):
    """Reads one or more streams and delivers their records in order.

    Without `app=` it stores nothing and starts at the tip. With it, it resumes at the application's checkpoints, alone
    or as one of many workers that share the shards.
    """

    def __init__(
        self,
        stream: str | Sequence[str],
        *,
        app: str | None = None,
        start: Literal["latest", "trim_horizon"] | datetime | None = None,
        until: Literal["tip"] | datetime | None = None,
        idle_timeout: float | None = None,
        leases: str | LeaseStore | None = None,
        read: Literal["polling"] = "polling",
        order: Literal["shard", "key", "none"] = "shard",
        concurrency: int = 32,
        decode: Decoder[T] = bytes,  # type: ignore[assignment]
        acknowledge: Literal["auto", "manual"] = "auto",
        on_failure: Retry | None = None,
        settings: ConsumerSettings | None = None,
        aws: Aws | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        check_kinds({**locals()})
        self._settings = settings or ConsumerSettings()
        self._streams = check_streams(stream, app=app, start=start, until=until, idle_timeout=idle_timeout, read=read)
        if order not in {"shard", "key", "none"}:
            raise ConfigurationError(f"order is {order!r}; it must be 'shard', 'key' or 'none'")
        if acknowledge not in {"auto", "manual"}:
            raise ConfigurationError(f"acknowledge is {acknowledge!r}; it must be 'auto' or 'manual'")
        self._manual_ack = acknowledge == "manual"
        if concurrency < 1:
            raise ConfigurationError(f"concurrency is {concurrency}; it must be at least 1")
        self._app = app
        self._start: Literal["latest", "trim_horizon"] | float = (
            start.timestamp() if isinstance(start, datetime) else start or ("latest" if app is None else "trim_horizon")
        )
        self._until = until
        self._idle_timeout = idle_timeout
        if leases is not None:
            open_store(leases, app or EPHEMERAL)  # checks the value; opens nothing yet
        self._leases = leases
        self._handler_options = HandlerOptions(
            order=order, concurrency=concurrency, decode=decode_with(decode), policy=on_failure or Retry()
        )
        self._aws = aws
        self._emit = make_emit(on_event)
        budget = self._settings.budget
        self._budget = budget if isinstance(budget, Budget) else Budget(budget)
        self._handler: Handler | None = None
        self._batch_handler: tuple[Handler, BatchLimits] | None = None
        self._ports: Ports | None = None
        self._account: AwsAccount | None = None
        self._client: KinesisClient | None = None
        self._consumer_run: ConsumerRun | None = None
        self._stop_count = 0
        """Calls of stop() while nothing was running: they stop the next run."""
        self._used_stop_count = 0
        """The count when a run was last stopped that way."""

    # opening and closing

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._consumer_run
        try:
            if run is not None:
                await run.leave(error, self._settings.leases.drain_deadline)
        finally:
            await self._close()

    async def _open(self) -> Ports:
        if self._ports is not None:
            return self._ports
        if self._app is None and self._leases is None:
            store: LeaseStore = MemoryLeaseStore()
        elif self._leases is None:
            store = default_store(self._app or EPHEMERAL, os.environ)
        else:
            store = open_store(self._leases, self._app or EPHEMERAL)
        self._ports = await self._connect(store)
        return self._ports

    async def _connect(self, store: LeaseStore) -> Ports:
        self._account = AwsAccount(self._aws)
        try:
            region = await self._account.common_region(self._streams)
            self._client = await open_kinesis(self._account, region=region)
        except BaseException:
            await self._close()
            raise
        return Ports(
            kinesis=self._client,
            store=store,
            clock=SystemClock(),
            entropy=random.SystemRandom(),
            emit=self._emit,
            heartbeats_on_thread=True,
        )

    async def _close(self) -> None:
        ports, self._ports = self._ports, None
        if (
            ports is not None and ports.store is not self._leases
        ):  # the caller closes a store that it passed as an object
            await ports.store.close()
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        account, self._account = self._account, None
        if account is not None:
            account.close()

    def _begin(self, ports: Ports) -> ConsumerRun:
        settings = self._settings
        until = self._until
        plan = WorkerPlan(
            app=AppRow(app=self._app or EPHEMERAL, app_id=secrets.token_hex(16), created_wall_ms=ports.clock.wall_ms()),
            streams=self._streams,
            start=self._start,
            profile=MemberProfile(
                worker_id=settings.leases.worker_id or f"{socket.gethostname()}:{os.getpid()}",
                fingerprint=fingerprint((str(stream) for stream in self._streams), self._handler_options.order),
                shards_max=settings.leases.max_shards,
                any_order=settings.leases.any_order,
                is_exclusive=settings.leases.worker_id_exclusive,
            ),
            timing=lease_timing(round(settings.leases.expiry * 1000)),
            pace=PaceLimits(
                share=settings.polling.shard_share, idle_interval_ms=round(settings.polling.idle_interval * 1000)
            ),
            settings=settings,
            store_name=str(ports.store),
            stop_conditions=StopConditions(
                at_tip=until is not None,
                idle_timeout_ms=None if self._idle_timeout is None else round(self._idle_timeout * 1000),
                shards_max=settings.leases.max_shards,
            ),
            until_seconds=until.timestamp() if isinstance(until, datetime) else None,
        )
        run = ConsumerRun(ports, plan, self._handler_options, self._budget)
        run.on_start = lambda: self._take_turn(run)
        return run

    def _take_turn(self, run: ConsumerRun) -> None:
        """Called when the run starts. An iterator starts with its first step, maybe long after it was made."""
        if self._consumer_run is not None and self._consumer_run.is_running:
            raise UsageError("this consumer is already running: only one run or iterator at a time")
        self._consumer_run = run

    def _stops_before(self) -> int:
        """How many stop requests the next run ignores. If there was a run before, they may have been meant for it: all
        of them. If not: those that already stopped a run.
        """
        return self._used_stop_count if self._consumer_run is None else self._stop_count

    def _is_stopped(self, stops_before: int) -> bool:
        if self._stop_count == stops_before:
            return False
        self._used_stop_count = self._stop_count
        return True

    # iteration

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        """Iterates over records. Asking for the next one acknowledges the last, unless `acknowledge="manual"`."""
        run = self._begin(self._opened())
        return self._stoppable(run, run.records(manual_ack=self._manual_ack))

    def batches(
        self, *, max_records: int = 500, max_bytes: int = 1 << 20, max_wait: float = 1.0
    ) -> AsyncIterator[Batch[T]]:
        """Iterates over batches, each of one shard. Asking for the next one acknowledges the last."""
        self._refuse_manual_ack()
        limits = batch_limits(max_records, max_bytes, max_wait)
        run = self._begin(self._opened())
        return self._stoppable(run, run.batches(limits))

    def _stoppable(self, run: ConsumerRun, iteration: Iteration[Item]) -> Iteration[Item]:
        """Makes stop() work before the first step, when there is no run yet."""
        stops_before = self._stops_before()
        iteration.is_stopped = lambda: self._consumer_run is not run and self._is_stopped(stops_before)
        return iteration

    def _opened(self) -> Ports:
        if self._ports is None:
            raise UsageError("open the consumer first: `async with Consumer(...) as consumer`")
        return self._ports

    # handlers

    def handler(self, handler: Handler) -> Handler:
        """Decorator: the function handles the records in `run`. A consumer has one handler."""
        self._refuse_second_handler()
        self._handler = handler
        return handler

    def batch_handler(
        self, *, max_records: int = 500, max_bytes: int = 1 << 20, max_wait: float = 1.0
    ) -> Callable[[Handler], Handler]:
        """Decorator: the function handles the batches in `run_batches`."""
        limits = batch_limits(max_records, max_bytes, max_wait)

        def decorate(handler: Handler) -> Handler:
            self._refuse_second_handler()
            self._batch_handler = (handler, limits)
            return handler

        return decorate

    def _refuse_second_handler(self) -> None:
        if self.has_handler:
            handler = self._handler or (self._batch_handler or [None])[0]
            name = getattr(handler, "__qualname__", repr(handler))
            raise UsageError(
                f"this consumer already has the handler {name}: call both from one handler, or make another Consumer"
            )

    @property
    def has_handler(self) -> bool:
        """Whether a handler was registered, so that `run` needs no argument."""
        return self._handler is not None or self._batch_handler is not None

    @property
    def shares_leases(self) -> bool:
        """Whether other processes can share its leases."""
        if isinstance(self._leases, str):
            return not self._leases.lower().startswith("memory:")
        return self._app is not None if self._leases is None else not isinstance(self._leases, MemoryLeaseStore)

    async def run(
        self, handler: Handler | None = None, *, processes: int = 0, handle_signals: bool | None = None
    ) -> StopReport:
        """Handles records until stopped. Async handlers run on the event loop, plain functions in threads or
        `processes`.
        """
        if handler is None and self._handler is None and self._batch_handler is not None:
            if processes:
                raise UsageError("processes= needs a record handler; this consumer has a batch handler")
            return await self.run_batches(handle_signals=handle_signals)
        handler = handler or self._handler
        if handler is None:
            raise UsageError("run() needs a handler: pass one, or register one with @consumer.handler")
        call = HandlerCall(handler, threads=self._handler_options.concurrency, processes=processes)
        return await self._run(lambda run: run.handle_records(call), handle_signals=handle_signals)

    async def run_batches(
        self,
        handler: Handler | None = None,
        *,
        max_records: int = 500,
        max_bytes: int = 1 << 20,
        max_wait: float = 1.0,
        handle_signals: bool | None = None,
    ) -> StopReport:
        """As `run`, with a batch handler: one batch per shard at a time, several shards at once."""
        limits = batch_limits(max_records, max_bytes, max_wait)
        if handler is None:
            if self._batch_handler is None:
                raise UsageError(
                    "run_batches() needs a handler: pass one, or register one with @consumer.batch_handler()"
                )
            handler, limits = self._batch_handler
        call = HandlerCall(handler, threads=self._handler_options.concurrency)
        return await self._run(lambda run: run.handle_batches(call, limits), handle_signals=handle_signals)

    async def _run(self, make_sink: Callable[[ConsumerRun], Any], *, handle_signals: bool | None) -> StopReport:
        self._refuse_manual_ack()
        if not (handle_signals is None or isinstance(handle_signals, bool)):
            raise ConfigurationError(f"handle_signals is {handle_signals!r}; it must be True, False or None")
        opened_here = self._ports is None
        stops_before = self._stops_before()
        ports = await self._open()
        try:
            if self._is_stopped(stops_before):
                return StopReport()
            run = self._begin(ports)
            deadline_ms = round(self._settings.leases.drain_deadline * 1000)
            with stop_on_signals(run.worker, deadline_ms, handle_signals=handle_signals):
                try:
                    await run.start(make_sink(run))
                    return await run.wait()
                except asyncio.CancelledError as cancelled:
                    await run.stop_after_cancel(cancelled)
                    raise
                finally:
                    run.close()
        finally:
            if opened_here:
                await self._close()

    def run_sync(self, handler: Handler | None = None, **options: Any) -> StopReport:
        """`run` for programs without an event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.run(handler, **options))
        raise UsageError(
            "run_sync() starts an event loop, but one is already running in this thread: use `await consumer.run(...)`"
        )

    def _refuse_manual_ack(self) -> None:
        if self._manual_ack:
            raise UsageError(
                'acknowledge="manual" works with `async for` only; handlers and batches are acknowledged automatically'
            )

    # this process

    def ack(self, *records: Record[T]) -> None:
        """Acknowledges records of an iteration with `acknowledge="manual"`, in any order."""
        self._running().ack(records)

    def pause(self) -> None:
        """Stops reading until `resume`. Records that were already read are still delivered."""
        self._running().worker.pause()

    def resume(self) -> None:
        """Reads again after `pause`."""
        self._running().worker.resume()

    def status(self) -> ConsumerStatus:
        """The state of this process: its shards, their lag, why one is stalled. Without a run it holds no shards."""
        if self._consumer_run is not None and self._consumer_run.is_running:
            return self._consumer_run.worker.status()
        return ConsumerStatus(
            app=self._app or EPHEMERAL,
            member_id=None,
            fenced=True,
            paused=False,
            shards=(),
            budget_used_bytes=self._budget.used_bytes,
            budget_limit_bytes=self._budget.limit_bytes,
        )

    async def stop(self, *, deadline: float | None = None) -> StopReport:
        """Stops gracefully: stops reading, waits for running calls, commits, and frees the leases. The report says what
        still ran at the deadline.

        `deadline` is in seconds; None means `LeaseSettings.drain_deadline`. It can be called from any thread and event
        loop. In a handler it returns at once, because it would wait for that handler; `run` returns the report. In a
        loop body it acknowledges the current record, unless an error is being handled; after the loop it does not.
        Before the first run or loop it stops that one before it starts.
        """
        if deadline is None:
            deadline = self._settings.leases.drain_deadline
        run = self._consumer_run
        if run is None or not run.is_running:
            self._stop_count += 1
        return StopReport() if run is None else await run.stop(deadline)

    def _running(self) -> ConsumerRun:
        if self._consumer_run is None or not self._consumer_run.is_running:
            raise UsageError("this consumer is not running")
        return self._consumer_run


KINDS: Final = {
    "app": str | None,
    "idle_timeout": float | None,
    "order": str,
    "concurrency": int,
    "acknowledge": str,
    "on_failure": Retry | None,
    "settings": ConsumerSettings | None,
    "aws": Aws | None,
}
BATCH_KINDS: Final = {"max_records": int, "max_bytes": int, "max_wait": float}


def check_kinds(given: Mapping[str, object]) -> None:
    if wrong := type_violations(given, KINDS):
        raise ConfigurationError(wrong)


def check_streams(
    stream: object,
    *,
    app: str | None,
    start: object,
    until: object,
    idle_timeout: float | None,
    read: str,
) -> tuple[StreamName, ...]:
    violations = []
    names = tuple(stream) if isinstance(stream, Collection) and not isinstance(stream, str) else (stream,)
    streams: list[StreamName] = []
    for name in names:
        if not isinstance(name, str):
            violations.append(f"a stream must be a name or an ARN as text, not {name!r}")
            continue
        try:
            streams.append(parse_stream(name))
        except ValueError as error:
            violations.append(str(error))
    if not names:
        violations.append("pass at least one stream")
    if len({str(parsed) for parsed in streams}) < len(streams):
        violations.append("a stream is given twice")
    if app is not None and not 1 <= len(app) <= 128:
        violations.append("app must have 1 to 128 characters")
    if read != "polling":
        violations.append(f"read is {read!r}; this version only supports 'polling'")
    for name, value, word in (("start", start, {"latest", "trim_horizon"}), ("until", until, {"tip"})):
        if isinstance(value, datetime):
            if value.tzinfo is None:
                violations.append(f"{name} is a datetime without a time zone: use one like datetime.now(UTC)")
        elif value is not None and value not in word:
            violations.append(f"{name} is {value!r}; it must be {' or '.join(sorted(map(repr, word)))}, or a datetime")
    if idle_timeout is not None and idle_timeout <= 0:
        violations.append(f"idle_timeout is {idle_timeout}; it must be positive")
    if violations:
        raise ConfigurationError(violations)
    return tuple(streams)


def batch_limits(max_records: int, max_bytes: int, max_wait: float) -> BatchLimits:
    given = {"max_records": max_records, "max_bytes": max_bytes, "max_wait": max_wait}
    if wrong := type_violations(given, BATCH_KINDS):
        raise ConfigurationError(wrong)
    if max_records < 1 or max_bytes < 1 or max_wait < 0:
        raise ConfigurationError(
            f"a batch of max_records={max_records}, max_bytes={max_bytes}, max_wait={max_wait} is invalid: "
            "max_records and max_bytes must be at least 1, max_wait must not be negative"
        )
    return BatchLimits(max_records, max_bytes, round(max_wait * 1000))

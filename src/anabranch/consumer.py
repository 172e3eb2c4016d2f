"""`Consumer`: reads streams in order, across resharding, restarts and many workers.

A facade: it checks the options and connects the engine (`_engine.consumer_run`) to AWS and a lease store.
"""

import asyncio
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from functools import partial
from inspect import signature
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, overload

from anabranch._aws.account import AwsAccount
from anabranch._aws.kinesis_client import KinesisClient, open_kinesis
from anabranch._core.handling.batches import BatchLimits
from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.timing import lease_timing
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.clock import SystemClock
from anabranch._engine.consumer_run import ConsumerRun, EngineMode, RunPlan
from anabranch._engine.fanout_registration import FanOutPlan
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._engine.signals import stop_on_signals
from anabranch._engine.stop_conditions import StopConditions
from anabranch._event_loops import read_on, running_loop
from anabranch._model.kinds import check_arguments, check_seconds, refuse
from anabranch._model.leases import WORKER_ID_BYTES_MAX, AppRow
from anabranch._model.streams import StreamName, parse_stream
from anabranch._ports import LeaseStore, LetterDestination, Ports
from anabranch._tracing import Tracing
from anabranch.alerts import Alert, check_alerts
from anabranch.budget import Budget
from anabranch.config import Aws, ConsumerSettings, FanOutSettings
from anabranch.dead_letters.opening import open_destination
from anabranch.dead_letters.redrive import RegisteredHandler
from anabranch.errors import ConfigurationError, UsageError
from anabranch.events import Event
from anabranch.health import HealthApp, HealthServer
from anabranch.logs import make_emit
from anabranch.metrics.catalogue import Level, Measurement, OwnMetrics, consumer_measurements
from anabranch.metrics.sources import Exporter, Exporters, Source, check_level
from anabranch.policies import DeadLetter, Retry
from anabranch.records import Batch, Context, Record, checked_metric
from anabranch.reports import ConsumerStatus, HealthReport, StopReport
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.s3 import S3LeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore
from anabranch.stores.urls import default_store, leases_from, open_store, shown_url
from anabranch.values import Decoder, ValueT as T, decode_with

__all__ = ["Consumer"]

R = TypeVar("R")

RecordHandler: TypeAlias = Callable[[Record[T]], object] | Callable[[Record[T], Context], object]
BatchHandler: TypeAlias = Callable[[Batch[T]], object] | Callable[[Batch[T], Context], object]
"""Async functions and plain ones, with or without the context. What they return is not used."""


class BatchDecorator(Protocol[T]):
    @overload
    def __call__(self, handler: Callable[[Batch[T]], R], /) -> Callable[[Batch[T]], R]: ...
    @overload
    def __call__(self, handler: Callable[[Batch[T], Context], R], /) -> Callable[[Batch[T], Context], R]: ...


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
        read: Literal["polling", "fanout"] = "polling",
        order: Literal["shard", "key", "none"] = "shard",
        concurrency: int = 32,
        decode: Decoder[T] = bytes,  # type: ignore[assignment]
        acknowledge: Literal["auto", "manual"] = "auto",
        on_failure: Retry | None = None,
        settings: ConsumerSettings | None = None,
        aws: Aws | None = None,
        metrics: Sequence[Exporter] = (),
        health_port: int | None = None,
        on_event: Callable[[Event], None] | None = None,
        alerts: Sequence[Alert] = (),
    ) -> None:
        given = {**locals()}
        self._streams = check_options(given)
        self._changed_options = changed_options(given)
        self._alerts = check_alerts(alerts)
        self._settings = settings or ConsumerSettings()
        self._read = read
        check_fanout(self._settings.fanout, self._streams, read)
        check_letters(on_failure, app, aws)
        self._manual_ack = acknowledge == "manual"
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
        self.health_host, self.health_port = self._settings.health_host, health_port
        """Where health checks are served, if the port is not None."""
        self.health_url: str | None = None
        """Where health is served now."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._own_metrics = OwnMetrics(self._emit)
        namespace = "Anabranch" if app is None else f"Anabranch/{app}"
        self.exporters = Exporters(
            metrics, Source(app or EPHEMERAL, self._measure, self._emit, namespace=namespace, aws=aws)
        )
        self._tracing = Tracing(self._emit) if self._settings.trace else None
        self._registered: tuple[Callable[..., object], BatchLimits | None] | None = None
        """The handler, and the limits of its batches; None if it handles records."""
        self._ports: Ports | None = None
        self._resources = AsyncExitStack()
        """Closes what the ports use, the exporters first."""
        self._consumer_run: ConsumerRun | None = None
        self._early_stop = asyncio.Event()
        """Set by stop() while nothing is running: it stops the next run before it starts."""

    # opening and closing

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run = self._consumer_run
        try:
            if run is not None:
                await run.leave(error, self._settings.leases.drain_deadline)
        finally:
            await self._close()

    async def _open(self) -> Ports:
        if self._ports is not None:
            return self._ports
        async with AsyncExitStack() as resources:
            store = self._open_store()
            if store is not self._leases:  # the caller closes a store that it passed as an object
                resources.push_async_callback(store.close)
            ports = await self._connect(store, resources)
            letters = self._open_letters(store)
            if letters is not None:
                resources.push_async_callback(letters.close)
            if self.health_port is not None:
                server = HealthServer(HealthApp(self), host=self.health_host, port=self.health_port)
                self.health_url = await server.start()
                resources.push_async_callback(server.stop)
            self._loop = asyncio.get_running_loop()
            self.exporters.start()
            resources.push_async_callback(self.exporters.stop)
            self._ports = replace(ports, letters=letters)
            self._resources = resources.pop_all()
        return self._ports

    def _open_store(self) -> LeaseStore:
        if self._leases is not None:
            return open_store(self._leases, self._app or EPHEMERAL, self._aws)
        return MemoryLeaseStore() if self._app is None else default_store(self._app, os.environ, self._aws)

    def _open_letters(self, store: LeaseStore) -> LetterDestination | None:
        """Where dead letters go. Without a URL: a file beside the leases."""
        then = self._handler_options.policy.then
        if not isinstance(then, DeadLetter):
            return None
        return open_destination(
            then.url,
            app=self._app or EPHEMERAL,
            environ=os.environ,
            aws=self._aws,
            leases_path=store.path if isinstance(store, SqliteLeaseStore) else None,
            redact=then.redact,
            overflow=then.overflow,
        )

    async def _connect(self, store: LeaseStore, resources: AsyncExitStack) -> Ports:
        account = AwsAccount(self._aws)
        resources.callback(account.close)
        client = await open_kinesis(account, region=await account.common_region(self._streams))
        resources.push_async_callback(client.close)
        return Ports(
            kinesis=client,
            store=store,
            clock=SystemClock(),
            entropy=random.SystemRandom(),
            emit=self._emit,
            heartbeats_on_thread=True,
            tracing=self._tracing,
            add_metric=self._own_metrics.add,
        )

    async def _close(self) -> None:
        self._ports = None
        self.health_url = None
        await self._resources.aclose()

    def _begin(self, ports: Ports, mode: EngineMode, early_stop: asyncio.Event) -> ConsumerRun:
        settings = self._settings
        until = self._until
        plan = RunPlan(
            app=AppRow(app=self._app or EPHEMERAL, app_id=secrets.token_hex(16), created_wall_ms=ports.clock.wall_ms()),
            streams=self._streams,
            start=self._start,
            profile=MemberProfile(
                worker_id=settings.leases.worker_id or _default_worker_id(),
                order=self._handler_options.order,
                shards_max=settings.leases.max_shards,
                any_order=settings.leases.any_order,
                is_exclusive=settings.leases.worker_id_exclusive,
            ),
            timing=lease_timing(round(settings.leases.expiry * 1000)),
            pace=PaceLimits(
                share=settings.polling.shard_share, idle_interval_ms=round(settings.polling.idle_interval * 1000)
            ),
            fanout=self._fanout_plan(ports.store) if self._read == "fanout" else None,
            settings=settings,
            stop_conditions=StopConditions(
                at_tip=until is not None,
                idle_timeout_ms=None if self._idle_timeout is None else round(self._idle_timeout * 1000),
            ),
            until_seconds=until.timestamp() if isinstance(until, datetime) else None,
            alerts=self._alerts,
            region=ports.kinesis.region if isinstance(ports.kinesis, KinesisClient) else None,
            differing_settings=self._changed_options,
        )
        claim = partial(self._claim, early_stop)
        return ConsumerRun(ports, plan, mode, self._handler_options, self._budget, claim=claim)

    def _fanout_plan(self, store: LeaseStore) -> FanOutPlan:
        """Without `app=`, and with leases that end with the process, nobody could use the consumer again."""
        given = self._settings.fanout
        is_own = given.consumer_name is None and given.consumer_arn is None
        is_temporary = is_own and (self._app is None or isinstance(store, MemoryLeaseStore))
        return FanOutPlan(
            app=self._app,
            name=given.consumer_name,
            arn=given.consumer_arn,
            removes=given.deregister_on_stop or is_temporary,
            is_temporary=is_temporary,
        )

    def _next_early_stop(self) -> asyncio.Event:
        """The event that stops the next run before it starts. A stop() until now was meant for the last run, if any."""
        if self._consumer_run is not None:
            self._early_stop = asyncio.Event()
        return self._early_stop

    def _claim(self, early_stop: asyncio.Event, run: ConsumerRun) -> bool:
        """Called when the run starts. Returns False if stop() was called before."""
        if self._consumer_run is not None and self._consumer_run.is_running:
            raise UsageError("this consumer is already running: only one run or iterator at a time")
        if early_stop.is_set():
            self._early_stop = asyncio.Event()
            return False
        if self._consumer_run is not None:
            self.exporters.source.begin_run()
        self._consumer_run = run
        return True

    # iteration

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        """Iterates over records. Asking for the next one acknowledges the last, unless `acknowledge="manual"`."""
        mode = EngineMode(manual_ack=self._manual_ack)
        return self._begin(self._opened(), mode, self._next_early_stop()).records()

    def batches(
        self, *, max_records: int = 500, max_bytes: int = 1 << 20, max_wait: float = 1.0
    ) -> AsyncIterator[Batch[T]]:
        """Iterates over batches, each of one shard. Asking for the next one acknowledges the last."""
        self._refuse_manual_ack()
        limits = batch_limits(max_records, max_bytes, max_wait)
        return self._begin(self._opened(), EngineMode(batches=limits), self._next_early_stop()).batches()

    def _opened(self) -> Ports:
        if self._ports is None:
            raise UsageError("open the consumer first: `async with Consumer(...) as consumer`")
        return self._ports

    # handlers

    @overload
    def handler(self, handler: Callable[[Record[T]], R]) -> Callable[[Record[T]], R]: ...
    @overload
    def handler(self, handler: Callable[[Record[T], Context], R]) -> Callable[[Record[T], Context], R]: ...
    def handler(self, handler: RecordHandler[T]) -> RecordHandler[T]:
        """Decorator: the function handles the records in `run`. A consumer has one handler."""
        self._register(handler, None)
        return handler

    def batch_handler(
        self, *, max_records: int = 500, max_bytes: int = 1 << 20, max_wait: float = 1.0
    ) -> BatchDecorator[T]:
        """Decorator: the function handles the batches in `run_batches`."""
        limits = batch_limits(max_records, max_bytes, max_wait)

        def decorate(handler: Any) -> Any:
            self._register(handler, limits)
            return handler

        return decorate

    def _register(self, handler: Callable[..., object], limits: BatchLimits | None) -> None:
        if self._registered is not None:
            name = getattr(self._registered[0], "__qualname__", repr(self._registered[0]))
            raise UsageError(
                f"this consumer already has the handler {name}: call both from one handler, or make another Consumer"
            )
        self._registered = (handler, limits)

    @property
    def has_handler(self) -> bool:
        """Whether a handler was registered, so that `run` needs no argument."""
        return self._registered is not None

    @property
    def registered_handler(self) -> RegisteredHandler:
        """The handler and how it is called, for a redrive of dead letters."""
        if self._registered is None:
            raise UsageError("this consumer has no handler: use @consumer.handler or @consumer.batch_handler()")
        streams = tuple(stream.name for stream in self._streams)
        return RegisteredHandler(*self._registered, self._handler_options, self._app, streams)

    @property
    def shares_leases(self) -> bool:
        """Whether other processes can share its leases."""
        leases = self._leases
        if leases is None:
            if self._app is None:
                return False
            leases = leases_from(os.environ) or ""
        if isinstance(leases, str):
            return not leases.lower().startswith(("memory:", "s3:"))
        return not isinstance(leases, MemoryLeaseStore | S3LeaseStore)

    async def run(
        self, handler: RecordHandler[T] | None = None, *, processes: int = 0, handle_signals: bool | None = None
    ) -> StopReport:
        """Handles records until stopped: with async functions on the event loop, plain ones in threads or processes."""
        if handler is None:
            handler, limits = self._registered or (None, None)
            if limits is not None:
                return await self.run_batches(processes=processes, handle_signals=handle_signals)
        if handler is None:
            raise UsageError("run() needs a handler: pass one, or register one with @consumer.handler")
        return await self._run(handler, None, processes=processes, handle_signals=handle_signals)

    async def run_batches(
        self,
        handler: BatchHandler[T] | None = None,
        *,
        max_records: int = 500,
        max_bytes: int = 1 << 20,
        max_wait: float = 1.0,
        processes: int = 0,
        handle_signals: bool | None = None,
    ) -> StopReport:
        """As `run`, with a batch handler: one batch per shard at a time, several shards at once."""
        limits = batch_limits(max_records, max_bytes, max_wait)
        if handler is None:
            handler, registered_limits = self._registered or (None, None)
            if handler is None or registered_limits is None:
                raise UsageError("run_batches() needs a handler: pass one, or use @consumer.batch_handler()")
            limits = registered_limits
        return await self._run(handler, limits, processes=processes, handle_signals=handle_signals)

    async def _run(
        self, handler: Callable[..., object], limits: BatchLimits | None, *, processes: int, handle_signals: bool | None
    ) -> StopReport:
        call = HandlerCall(handler, threads=self._handler_options.concurrency, processes=processes)
        self._refuse_manual_ack()
        if not (handle_signals is None or isinstance(handle_signals, bool)):
            raise ConfigurationError(f"handle_signals is {handle_signals!r}; it must be True, False or None")
        opened_here = self._ports is None
        early_stop = self._next_early_stop()
        ports = await self._open()
        try:
            run = self._begin(ports, EngineMode(call, limits), early_stop)
            if not self._claim(early_stop, run):
                return StopReport()
            with stop_on_signals(run, handle_signals=handle_signals):
                try:
                    await run.start()
                    return await run.wait()
                except asyncio.CancelledError as cancelled:
                    await run.stop_after_cancel(cancelled)
                    raise
                finally:
                    run.close()
        finally:
            if opened_here:
                await self._close()

    def run_sync(self, handler: RecordHandler[T] | None = None, **options: Any) -> StopReport:
        """`run` for programs without an event loop."""
        if running_loop() is not None:
            raise UsageError("run_sync() cannot be called in a running event loop: use `await consumer.run(...)`")
        return asyncio.run(self.run(handler, **options))

    def _refuse_manual_ack(self) -> None:
        if self._manual_ack:
            raise UsageError('acknowledge="manual" works with `async for` only, not with handlers or batches')

    # this process

    def ack(self, *records: Record[T]) -> None:
        """Acknowledges records of an iteration with `acknowledge="manual"`, in any order."""
        self._running().ack(records)

    def pause(self) -> None:
        """Stops reading until `resume`. Records that were already read are still delivered."""
        self._running().pause()

    def resume(self) -> None:
        """Reads again after `pause`."""
        self._running().resume()

    def status(self) -> ConsumerStatus:
        """The state of this process: its shards, their lag, why one is stalled. Without a run it holds no shards. From
        any thread; in another one it raises TimeoutError if the event loop is busy for more than a second.
        """
        run, loop = self._consumer_run, self._loop
        if run is not None and run.is_running:
            return run.status() if loop is None else read_on(loop, run.status)
        return ConsumerStatus(
            app=self._app or EPHEMERAL,
            budget_used_bytes=self._budget.used_bytes,
            budget_limit_bytes=self._budget.limit_bytes,
        )

    @property
    def restart_reason(self) -> str | None:
        """Why this process should be restarted, as `/live` says; None if it should not. From any thread."""
        run = self._consumer_run
        return None if run is None else run.restart_reason

    def health(self) -> HealthReport:
        """Whether it is live and ready, as `/live` and `/ready` say. From any thread."""
        run, loop = self._consumer_run, self._loop
        if (reason := self.restart_reason) is not None:
            return HealthReport(live=False, ready=False, reasons=(reason,))
        if run is None or loop is None or not run.is_running:
            return HealthReport(live=True, ready=False, reasons=("it is not running",))
        try:
            reasons = read_on(loop, run.unready_reasons)
        except (TimeoutError, RuntimeError) as error:
            reasons = (str(error),)
        return HealthReport(live=True, ready=not reasons, reasons=reasons)

    def metrics(self, level: Level = "detailed") -> list[Measurement]:
        """All counters and gauges, as exporters see them. Counters grow from run to run."""
        return self.exporters.source.read(check_level(level))

    def metric(self, name: str, value: float) -> None:
        """Reports a value of a custom metric. In a handler use `context.metric`: it counts only successful calls."""
        self._own_metrics.add(*checked_metric(name, value))

    def _measure(self, level: Level) -> Iterable[Measurement]:
        run = self._consumer_run
        if run is None:
            return []
        measured = consumer_measurements(run.measures(), self._own_metrics.summaries, level)
        return measured if run.is_running else [one for one in measured if one.grows]

    async def stop(self, *, deadline: float | None = None) -> StopReport:
        """Stops gracefully: stops reading, waits for running calls, commits, and frees the leases. The report says what
        still ran at the deadline.

        `deadline` is in seconds; None means `LeaseSettings.drain_deadline`. It can be called from any thread and event
        loop. In a handler it returns at once, because it would wait for that handler; `run` returns the report. In a
        loop body it acknowledges the current record, unless an error is being handled; after the loop it does not.
        If nothing has run yet, the first run or loop ends before it starts.
        """
        check_seconds("deadline", deadline)
        if deadline is None:
            deadline = self._settings.leases.drain_deadline
        run = self._consumer_run
        if run is None or not run.is_running:
            self._early_stop.set()
        return StopReport() if run is None else await run.stop(deadline)

    def _running(self) -> ConsumerRun:
        if self._consumer_run is None or not self._consumer_run.is_running:
            raise UsageError("this consumer is not running")
        return self._consumer_run


CHECKED_ELSEWHERE: Final = {"stream", "leases", "decode", "metrics", "on_event", "alerts"}
NOT_LOGGED: Final = {"stream", "app", "leases", "decode", "aws", "on_event"}
"""The start is logged with the streams, the application and the store; the others may have secrets, or say nothing."""


def check_options(given: Mapping[str, Any]) -> tuple[StreamName, ...]:
    """Returns the streams."""
    violations = check_arguments(Consumer.__init__, given, but=CHECKED_ELSEWHERE)
    if given["idle_timeout"] is not None and given["idle_timeout"] <= 0:
        violations.append(f"idle_timeout is {given['idle_timeout']}; it must be positive")
    if given["concurrency"] < 1:
        violations.append(f"concurrency is {given['concurrency']}; it must be at least 1")
    if given["health_port"] is not None and not 0 <= given["health_port"] <= 65_535:
        violations.append(f"health_port is {given['health_port']}; it must be from 1 to 65535, or 0 for a free one")
    stream, app = given["stream"], given["app"]
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
    for name in ("start", "until"):
        if isinstance(given[name], datetime) and given[name].tzinfo is None:
            violations.append(f"{name} is a datetime without a time zone: use one like datetime.now(UTC)")
    refuse(violations)
    return tuple(streams)


def changed_options(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Options and settings that are not the default, for the log."""
    defaults = {name: one.default for name, one in signature(Consumer).parameters.items() if name not in NOT_LOGGED}
    defaults |= {"on_failure": Retry(), "settings": ConsumerSettings()}
    return tuple(
        text.removeprefix("settings.")
        for name, default in defaults.items()
        if given[name] is not None
        for text in differing(name, given[name], default)
    )


def differing(name: str, given: object, default: object) -> Iterator[str]:
    """What is not the default, as `name=value`; of settings, each field by itself."""
    if is_dataclass(given) and type(given) is type(default):
        for one in fields(given):
            yield from differing(f"{name}.{one.name}", getattr(given, one.name), getattr(default, one.name))
    elif given != default:
        yield f"{name}={shown(given)}"


def shown(value: object) -> str:
    """The value for the log, without what may be secret."""
    match value:
        case list() | tuple():
            return ",".join(map(shown, value))
        case Alert():
            return f"{value.lag:g}s"
        case Budget():
            return str(value.limit_bytes)
        case datetime():
            return value.isoformat()
        case str() if "://" in value:
            return shown_url(value)
        case str() | int() | float() | None:
            return str(value)
    return type(value).__name__


def check_letters(policy: Retry | None, app: str | None, aws: Aws | None) -> None:
    """Checks where dead letters go; opens nothing."""
    if policy is None or not isinstance(policy.then, DeadLetter):
        return
    then = policy.then
    if then.url is None and app is None:
        raise ConfigurationError("DeadLetter() without a URL keeps a file beside the leases, which needs app=")
    if then.url is not None:
        open_destination(
            then.url, app=app or EPHEMERAL, environ={}, aws=aws, redact=then.redact, overflow=then.overflow
        )


def check_fanout(settings: FanOutSettings, streams: Sequence[StreamName], read: str) -> None:
    arn = settings.consumer_arn
    if read != "fanout" and settings != FanOutSettings():
        raise ConfigurationError("settings.fanout is only used with read='fanout'")
    if arn is None:
        return
    if len(streams) != 1:
        raise ConfigurationError("consumer_arn names a consumer of one stream; read the others with a Consumer each")
    stream_arn = arn.partition("/consumer/")[0]
    named = streams[0].arn or stream_arn
    if stream_arn != named or stream_arn.rpartition("/")[2] != streams[0].name:
        raise ConfigurationError(f"consumer_arn names a consumer of {stream_arn}, not of stream {streams[0]}")


def batch_limits(max_records: int, max_bytes: int, max_wait: float) -> BatchLimits:
    check_arguments(batch_limits, locals())
    if max_records < 1 or max_bytes < 1 or max_wait < 0:
        raise ConfigurationError(
            f"a batch of max_records={max_records}, max_bytes={max_bytes}, max_wait={max_wait} is invalid: "
            "max_records and max_bytes must be at least 1, max_wait must not be negative"
        )
    return BatchLimits(max_records, max_bytes, round(max_wait * 1000))


def _default_worker_id() -> str:
    """Host name and process id. A long host name is cut: the member's row must stay small."""
    process = f":{os.getpid()}"
    host = socket.gethostname().encode()[: WORKER_ID_BYTES_MAX - len(process)].decode(errors="ignore")
    return host + process

"""What exporters read: a consumer or a producer, from any thread, without delaying its records.

A read runs on the event loop of its owner, between two steps. An exporter in another thread asks for it and waits a
moment; if the loop is busy for longer, it gets the previous reading.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from anabranch._event_loops import read_on, running_loop
from anabranch.config import Aws
from anabranch.errors import ConfigurationError
from anabranch.events import Event, ExporterFailed, ExporterRecovered
from anabranch.metrics.catalogue import Level, Measurement, merged


class Source:
    """One consumer or producer, as exporters see it."""

    def __init__(
        self,
        name: str,
        read: Callable[[Level], Iterable[Measurement]],
        emit: Callable[[Event], None],
        *,
        namespace: str,
        aws: Aws | None = None,
    ) -> None:
        self.name = name
        self.namespace = namespace
        """For CloudWatch, if the exporter has none of its own."""
        self.aws = aws
        self._read = read
        self._emit = emit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last: dict[Level, list[Measurement]] = {}
        self._ended: list[Measurement] = []
        """What earlier runs counted: counters never go back."""
        self._failures: dict[int, int] = {}
        """Failures in a row, by the identity of the exporter: a consumer can have two of one class."""

    def begin_run(self) -> None:
        """Its owner counts from zero again."""
        self._ended = [one for one in self._measure("summary") if one.grows and not one.metric.is_own]

    def begin(self) -> None:
        """Its owner runs on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """Its owner has ended: only its counters are left. Call it on the owner's event loop."""
        final = [one for one in self._measure("detailed") if one.grows]
        self._last = {"summary": [one for one in final if not one.is_of_shard], "detailed": final}
        self._loop = None

    def forget_shards(self) -> None:
        """After the end: other workers hold the shards now."""
        self._last["detailed"] = self._last["summary"]

    def read(self, level: Level) -> list[Measurement]:
        """All measurements of this level, from any thread."""
        if self._loop is not None:
            with suppress(TimeoutError, RuntimeError):  # busy or closed: returns the previous reading
                self._last[level] = read_on(self._loop, lambda: self._measure(level))
        return self._last.get(level, [])

    def _measure(self, level: Level) -> list[Measurement]:
        return merged([*self._read(level), *self._ended])

    # failures: reported as events; they never stop the consumer or producer

    def failed(self, exporter: object, error: Exception, *, name: str = "") -> None:
        """`name`: the name in the event; by default the class."""
        count = self._failures[id(exporter)] = self._failures.get(id(exporter), 0) + 1
        if count & (count - 1) == 0:  # reports the 1st, 2nd, 4th, 8th, ...
            text = f"{type(error).__name__}: {error}"
            self._report(ExporterFailed(exporter=name or type(exporter).__name__, error=text, failure_count=count))

    def succeeded(self, exporter: object, *, name: str = "") -> None:
        if count := self._failures.pop(id(exporter), 0):
            self._report(ExporterRecovered(exporter=name or type(exporter).__name__, failure_count=count))

    def _report(self, event: Event) -> None:
        loop = self._loop
        if loop is None or running_loop() is loop:
            self._emit(event)
            return
        try:
            loop.call_soon_threadsafe(self._emit, event)
        except RuntimeError:  # the loop is closed
            self._emit(event)


@runtime_checkable
class Exporter(Protocol):
    """Sends metrics to another system. Its methods are called on the event loop and must not block. One exporter can
    serve several consumers and producers.
    """

    level: Level

    def start(self, source: Source) -> None: ...

    async def stop(self, source: Source) -> None:
        """`source` has ended, but can still be read. Takes a few seconds at most."""


def read_all(sources: Mapping[Source, Level], reader: object, name: str) -> list[Measurement]:
    """All measurements of several sources. One that fails is reported under this name, and the others are read."""
    measured: list[Measurement] = []
    for source, level in list(sources.items()):
        try:
            measured += source.read(level)
        except Exception as error:  # noqa: BLE001 -- a failing read must not spoil the rest
            source.failed(reader, error, name=name)
        else:
            source.succeeded(reader, name=name)
    return merged(measured)


def check_level(level: object) -> Level:
    if level not in ("none", "summary", "detailed"):
        raise ConfigurationError(f"level is {level!r}; it must be 'none', 'summary' or 'detailed'")
    return level


class Exporters:
    """The exporters of one consumer or producer. A failing one is reported, and changes nothing else."""

    def __init__(self, given: object, source: Source) -> None:
        if not isinstance(given, list | tuple):
            raise ConfigurationError(f"metrics is {given!r}; it must be a list of exporters, such as [Prometheus()]")
        for exporter in given:
            if isinstance(exporter, type) or not isinstance(exporter, Exporter):
                raise ConfigurationError(
                    f"metrics has {exporter!r}; it must be an exporter from anabranch.metrics, such as Prometheus()"
                )
        self.exporters: Sequence[Exporter] = [exporter for exporter in given if exporter.level != "none"]
        self.source = source
        self._is_started = False

    def start(self) -> None:
        if self._is_started:
            return
        self._is_started = True
        self.source.begin()
        for exporter in self.exporters:
            try:
                exporter.start(self.source)
            except Exception as error:  # noqa: BLE001 -- an exporter must not keep records from being handled
                self.source.failed(exporter, error)

    async def stop(self) -> None:
        if not self._is_started:
            return
        self._is_started = False
        self.source.end()
        outcomes = await asyncio.gather(
            *(exporter.stop(self.source) for exporter in self.exporters), return_exceptions=True
        )
        for exporter, outcome in zip(self.exporters, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.source.failed(exporter, outcome)
        self.source.forget_shards()

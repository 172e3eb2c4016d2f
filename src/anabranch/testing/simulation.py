"""`simulate(handler, records)`: runs a user's handler in a fleet of real workers, with faults, in virtual time.

The seed decides everything: the same call gives the same run. The handler must be an async function that waits only
through `asyncio`. A simulation has no threads, no sockets and no real time; an hour of waiting costs nothing.
"""

import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec.structs import replace

from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch.consumer import Consumer
from anabranch.dead_letters.redrive import RegisteredHandler
from anabranch.policies import Retry
from anabranch.records import Context, Record
from anabranch.testing.world.fleet import FleetVerdict, Outcome, SimulatedFleet
from anabranch.testing.world.options import FleetOptions, ScriptAction
from anabranch.values import Decoder, decode_with

Fault = Literal["crash", "cut_off", "lost_messages", "pause", "reshard", "stop", "throttle"]

_FAULTS: Final[dict[str, dict[str, Any]]] = {
    "crash": {"crash_every_seconds": 12.0},
    "cut_off": {"cut_off_every_seconds": 12.0},
    "lost_messages": {"lost": 0.05, "late": 0.05},
    "pause": {"pause_every_seconds": 12.0},
    "reshard": {"reshard_every_seconds": 6.0},
    "stop": {"stop_every_seconds": 12.0},
    "throttle": {"throttled": 0.2},
}


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    record_count: int
    call_count: int
    """Handler calls that started: more than records if some were repeated, for example after a crash."""
    finished_count: int
    seconds: float
    """Virtual seconds."""
    violations: tuple[str, ...]
    """Broken promises in the order of their time. A handler that never ends also breaks one."""
    outcomes: dict[int, Outcome] = {}
    """By the index of each record that was not handled: "dead-lettered", "skipped", or "stops"."""
    failure: str | None = None
    """What the handler raised first, if it ever did. This alone is no violation: a failed call is retried."""

    @property
    def repeated_count(self) -> int:
        return max(0, self.call_count - self.record_count)

    def check(self) -> None:
        """Raises AssertionError with the first violation and the seed, if there is any."""
        if self.violations:
            blame = "" if self.failure is None else f"; {self.failure}"
            raise AssertionError(f"{self.violations[0]}{blame} (simulate(..., seed={self.seed}) repeats this run)")


class _WatchedHandler:
    """Remembers the handler's failures: they are the likely reason if records are never finished."""

    def __init__(self, handler: Callable[..., Awaitable[Any]]) -> None:
        self._call = HandlerCall(handler, threads=1)
        if not self._call.is_async:
            raise ValueError(
                f"simulate needs an async function, and {getattr(handler, '__name__', handler)} is a plain function, "
                "which would need a thread; pass an async function that calls it"
            )
        self._count = 0
        self._first = ""

    @property
    def failure(self) -> str | None:
        if not self._count:
            return None
        times = "once" if self._count == 1 else f"{self._count} times"
        return f"the handler failed {times}, first with {self._first}"

    async def __call__(self, record: Record[Any], context: Context) -> None:
        try:
            await self._call(record, context, lambda: True)
        except Exception as error:
            self._count += 1
            if not self._first:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                self._first = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            raise


def simulate(
    handler: Callable[[Record[Any]], Awaitable[Any]] | Callable[[Record[Any], Context], Awaitable[Any]] | Consumer[Any],
    records: Iterable[tuple[str, bytes]],
    *,
    seed: int = 0,
    workers: int = 2,
    shards: int = 2,
    order: Literal["shard", "key", "none"] | None = None,
    concurrency: int | None = None,
    decode: Decoder[Any] | None = None,
    faults: Iterable[Fault] = (),
    script: Iterable[tuple[float, ScriptAction]] = (),
    seconds: float = 30.0,
    on_failure: Retry | None = None,
    expect: Mapping[int, Outcome] | None = None,
) -> SimulationReport:
    """Writes `records`, each a (partition key, data) pair, over `seconds` of virtual time while the faults strike. Then
    every record must be handled within three virtual minutes, plus half a second for each record.

    `faults` strike again and again at times that the seed decides. `script` says what happens at which second, for
    example `[(5.0, "split"), (9.0, "crash")]`.

    For a handler, `order` is "shard" by default, and `concurrency` is 8. Pass a consumer instead to use its registered
    handler, of records or of batches, and its order, concurrency, decoder, policy and limits of a batch.

    `expect` says which records are not handled, by their index: `{7: "stops"}`, `{7: "dead-lettered"}` or
    `{7: "skipped"}`. Any other end of a record is a violation. None allows every end that `on_failure` leads to.
    """
    written = list(records)
    if isinstance(handler, Consumer):
        options = {"concurrency": concurrency, "decode": decode, "on_failure": on_failure, "order": order}
        if ignored := [name for name, value in options.items() if value is not None]:
            raise ValueError(
                f"a consumer is simulated with its own {', '.join(ignored)}: pass them to Consumer, or pass a handler"
            )
        registered = handler.registered_handler
    else:
        handler_options = HandlerOptions(
            order=order or "shard",
            concurrency=8 if concurrency is None else concurrency,
            decode=decode_with(bytes if decode is None else decode),
            policy=on_failure or Retry(),
        )
        registered = RegisteredHandler(handler, None, handler_options)
    fleet_options = FleetOptions(
        worker_count=workers,
        shard_count=shards,
        faulty_seconds=seconds,
        **_disturbances(faults, tuple(script)),
    )
    watched = _WatchedHandler(registered.handler)
    verdict = SimulatedFleet(seed, fleet_options, replace(registered, handler=watched), written).run()
    return SimulationReport(
        seed=seed,
        record_count=len(written),
        call_count=verdict.starts,
        finished_count=verdict.finishes,
        seconds=verdict.seconds,
        violations=_violations(verdict, expect),
        outcomes=verdict.outcomes,
        failure=watched.failure,
    )


def _disturbances(faults: Iterable[Fault], script: tuple[tuple[float, ScriptAction], ...]) -> dict[str, Any]:
    """The options of a fleet that has these faults and this script."""
    chosen: dict[str, Any] = {"script": script}
    for fault in faults:
        if fault not in _FAULTS:
            raise ValueError(f"unknown fault {fault!r}; the faults are {', '.join(sorted(_FAULTS))}")
        chosen |= _FAULTS[fault]
    for _, action in script:
        if action not in get_args(ScriptAction):
            raise ValueError(
                f"unknown action {action!r} in script; the actions are {', '.join(get_args(ScriptAction))}"
            )
    return chosen


def _violations(verdict: FleetVerdict, expected: Mapping[int, Outcome] | None) -> tuple[str, ...]:
    """If a shard is expected to stop at a record, it and its descendants may keep unfinished records."""
    may_stop = expected is not None and "stops" in expected.values()
    found = [str(one) for one in verdict.violations if not (may_stop and one.promise == "no standstill")]
    if may_stop and verdict.left:
        found.append(f"{len(verdict.left)} records were never finished, the first is record {verdict.left[0]}")
    if expected is not None:
        for number in sorted({*expected, *verdict.outcomes}):
            wanted, was = expected.get(number, "handled"), verdict.outcomes.get(number, "handled")
            if wanted != was:
                found.append(f"record {number} should have the outcome {wanted!r}, and has {was!r}")
    return tuple(found)

"""`simulate(handler, records)`: a user's handler in a fleet of real workers, with faults, in virtual time.

Everything is decided by the seed: the same call gives the same run. The handler must be an async function that waits
by `asyncio` alone; there are no threads, no sockets and no real time in a simulation, and an hour of waiting costs
nothing.
"""

import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Literal, get_args

import msgspec

from anabranch._engine.handler_calls import HandlerCall
from anabranch.policies import Retry
from anabranch.records import Context, Record
from anabranch.testing.world import FleetOptions, run_fleet
from anabranch.testing.world.options import ScriptAction
from anabranch.testing.world.worker import UserHandler
from anabranch.values import Decoder, decode_with

__all__ = ["Fault", "SimulationReport", "simulate"]

Fault = Literal["crash", "cut_off", "lost_messages", "pause", "reshard", "stop", "throttle"]

_FAULTS: Final[dict[str, dict[str, Any]]] = {
    "crash": {"crashes_each": 12.0},
    "cut_off": {"cuts_each": 12.0},
    "lost_messages": {"lost": 0.05, "late": 0.05},
    "pause": {"pauses_each": 12.0},
    "reshard": {"reshards_each": 6.0},
    "stop": {"stops_each": 12.0},
    "throttle": {"throttled": 0.2},
}


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    record_count: int
    call_count: int
    """Handler calls that were started: more than records where some were repeated, after a crash for example."""
    finished_count: int
    seconds: float
    """Virtual ones."""
    violations: tuple[str, ...]
    """Broken promises, the first one first: of anabranch, or of a handler that never ends."""
    failure: str | None = None
    """What the handler raised first, if it ever did. By itself no violation: a failed call is repeated."""

    @property
    def repeated_count(self) -> int:
        return max(0, self.call_count - self.record_count)

    def check(self) -> None:
        """Raises AssertionError with the first violation and the seed, if there is any."""
        if self.violations:
            blame = "" if self.failure is None else f"; {self.failure}"
            raise AssertionError(f"{self.violations[0]}{blame} (simulate(..., seed={self.seed}) repeats this run)")


class _Watched:
    """A handler whose failures are remembered: they are the likely reason of a standstill."""

    def __init__(self, handler: Callable[..., Awaitable[Any]]) -> None:
        self._call = HandlerCall(handler, threads=1)
        if not self._call.is_async:
            raise ValueError(
                f"simulate runs async functions, and {getattr(handler, '__name__', handler)} is a plain one, which "
                "would need threads: simulate an async function that calls it"
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
    handler: Callable[[Record[Any]], Awaitable[Any]] | Callable[[Record[Any], Context], Awaitable[Any]],
    records: Iterable[tuple[str, bytes]],
    *,
    seed: int = 0,
    workers: int = 2,
    shards: int = 2,
    order: Literal["shard", "key", "none"] = "shard",
    concurrency: int = 8,
    decode: Decoder[Any] = bytes,
    faults: Iterable[Fault] = (),
    script: Iterable[tuple[float, ScriptAction]] = (),
    seconds: float = 30.0,
    on_failure: Retry | None = None,
) -> SimulationReport:
    """Writes `records`, (partition key, data) each, over so many virtual seconds while the faults strike; then
    everything must be handled within three virtual minutes.

    `faults` strike again and again, when the seed says; `script` says what happens at which second, for example
    `[(5.0, "split"), (9.0, "crash")]`.
    """
    written = list(records)
    chosen: dict[str, Any] = {}
    for fault in faults:
        if fault not in _FAULTS:
            raise ValueError(f"there is no fault {fault!r}; there are {', '.join(sorted(_FAULTS))}")
        chosen |= _FAULTS[fault]
    scenes = tuple(script)
    for _, scene in scenes:
        if scene not in get_args(ScriptAction):
            raise ValueError(f"there is no scene {scene!r}; there are {', '.join(get_args(ScriptAction))}")
    options = FleetOptions(
        worker_count=workers,
        shard_count=shards,
        record_count=len(written),
        order=order,
        concurrency=concurrency,
        faulty_seconds=seconds,
        script=scenes,
        **chosen,
    )
    watched = _Watched(handler)
    user_handler = UserHandler(watched, on_failure or Retry(), decode_with(decode))
    verdict = run_fleet(seed, options, user_handler=user_handler, records=written)
    return SimulationReport(
        seed=seed,
        record_count=len(written),
        call_count=verdict.starts,
        finished_count=verdict.finishes,
        seconds=verdict.seconds,
        violations=tuple(str(violation) for violation in verdict.violations),
        failure=watched.failure,
    )

"""An asyncio event loop in which time is virtual and everything is decided by a seed.

Nothing ever sleeps: when no callback is ready, the clock jumps to the next timer. The same seed gives the same run in
every process; there are no threads, no executors and no sockets, and asking for one raises. Two orders:

- `fifo` runs ready callbacks in the order in which they became ready, as asyncio promises: every failure is real;
- `shuffle` picks among them by the seed: stricter than reality, it finds code that relies on an order by accident.

Where nothing is ready and no timer is left, the program waits for ever: `Deadlock` names each task and where it waits.

asyncio keeps tasks in sets, which iterate by hash: tasks and futures are hashed by their number here, not by address.
"""

import asyncio
import heapq
from asyncio import base_events
from collections.abc import Callable, Coroutine, Generator
from random import Random
from typing import Any, Literal, NoReturn, TypeVar

__all__ = ["Deadlock", "NotInSimulation", "SimulationLoop", "TooManySteps", "run"]

T = TypeVar("T")

_STEPS_MAX = 20_000_000


class Deadlock(RuntimeError):  # noqa: N818 -- its name
    """Nothing is ready, and nothing ever will be."""


class TooManySteps(RuntimeError):  # noqa: N818 -- its name
    """The program runs without end: something polls without waiting."""


class NotInSimulation(RuntimeError):  # noqa: N818 -- its name
    """Threads, executors and sockets would make a run differ from the next one with the same seed."""


class _Task(asyncio.Task[T]):
    def __init__(
        self, coroutine: Generator[Any, None, T] | Coroutine[Any, Any, T], number: int, **options: Any
    ) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Future(asyncio.Future[T]):
    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimulationLoop(base_events.BaseEventLoop):
    # BaseEventLoop's queue of ready handles and heap of timers are its own business; they have been the same since
    # asyncio came to be, and there is no public way to run a loop without a selector.
    _ready: Any
    _scheduled: list[Any]

    def __init__(
        self, seed: int = 0, *, order: Literal["fifo", "shuffle"] = "fifo", steps_max: int = _STEPS_MAX
    ) -> None:
        super().__init__()
        self.steps = 0
        """Callbacks that ran: a measure of a run, and the same for the same seed."""
        self.gate: Callable[[asyncio.Handle], bool] | None = None
        """Asked before a callback runs; False means that the gate has kept it, to give it back later by `resume`."""
        self.context_for: Callable[[Any], Any] = lambda _: None
        """The context of a new task by its coroutine; None: a copy of the creator's, as always."""
        self._now = 0.0
        self._shuffles = order == "shuffle"
        self._random = Random(seed)  # noqa: S311 -- a simulation's dice, not a secret
        self._steps_max = steps_max
        self._made = 0
        self.set_task_factory(self._make_task)

    # time

    def time(self) -> float:
        return self._now

    def resume(self, handle: asyncio.Handle) -> None:
        """Gives back a callback that the gate had kept."""
        self._ready.append(handle)

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:  # noqa: SLF001 -- see above
            heapq.heappop(scheduled)._scheduled = False  # noqa: SLF001 -- see above
        if not ready:
            if not scheduled:
                raise Deadlock(self._who_waits())
            self._now = max(self._now, scheduled[0]._when)  # noqa: SLF001 -- see above
        while scheduled and scheduled[0]._when <= self._now:  # noqa: SLF001 -- see above
            timer = heapq.heappop(scheduled)
            timer._scheduled = False  # noqa: SLF001 -- see above
            if not timer.cancelled():
                ready.append(timer)
        if self._shuffles and ready:
            ready.rotate(-self._random.randrange(len(ready)))
            self._run(ready.popleft())
            return
        for _ in range(len(ready)):
            self._run(ready.popleft())

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled() or (self.gate is not None and not self.gate(handle)):
            return
        self.steps += 1
        if self.steps > self._steps_max:
            self._ready.appendleft(handle)
            raise TooManySteps(f"{self._steps_max} steps, and still at {self._now:.3f} s: {self._who_waits()}")
        handle._run()  # noqa: SLF001 -- see above

    def _who_waits(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"  {task.get_name()} waits {_where(task)}" for task in tasks]
        return "\n".join([f"nothing can happen any more at {self._now:.3f} s:", *lines])

    # what is made

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Any = None, **options: Any
    ) -> "_Task[Any]":
        self._made += 1
        chosen = self.context_for(coroutine) if context is None else context
        if chosen is not None:
            options["context"] = chosen
        options.setdefault("name", f"task {self._made}")
        return _Task(coroutine, self._made, loop=loop, **options)

    def create_future(self) -> "_Future[Any]":
        self._made += 1
        return _Future(self._made, loop=self)

    # what is forbidden

    def call_soon_threadsafe(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise NotInSimulation("call_soon_threadsafe: there are no threads in a simulation")

    def run_in_executor(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise NotInSimulation("run_in_executor: there are no threads in a simulation; handlers must be async functions")

    def getaddrinfo(self, *_: Any, **__: Any) -> NoReturn:
        raise NotInSimulation("there is no network in a simulation: give the code a simulated port")

    create_connection = create_server = create_datagram_endpoint = getaddrinfo

    def _process_events(self, _: Any) -> None:
        """There is no selector, so there are no events."""

    def _write_to_self(self) -> None:
        """There is nobody to wake."""


def run(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int = 0,
    order: Literal["fifo", "shuffle"] = "fifo",
    loop: SimulationLoop | None = None,
) -> T:
    """Runs `main()` to its end in virtual time, and then cancels whatever it left behind."""
    loop = loop or SimulationLoop(seed, order=order)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main())
    finally:
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _cancel_all(loop: SimulationLoop) -> None:
    """Some code swallows a cancellation that came at a bad moment; nobody may swallow twenty."""
    loop.steps = 0
    for _ in range(20):
        tasks = sorted(asyncio.all_tasks(loop), key=hash)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
    raise RuntimeError("these tasks cannot be cancelled: " + ", ".join(task.get_name() for task in tasks))


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line that a task stands at."""
    frames = task.get_stack()
    coroutine: Any = task.get_coro()
    frame = frames[-1] if frames else None
    while (inner := getattr(coroutine, "cr_await", None)) is not None:
        coroutine = inner
        frame = getattr(coroutine, "cr_frame", None) or frame
    if frame is None:
        return "to begin"
    return f"in {frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"

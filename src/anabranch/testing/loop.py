"""An asyncio event loop with virtual time, in which a seed decides everything.

It never sleeps: when no callback is ready, the clock jumps to the next timer. The same seed gives the same run in every
process. Threads, executors and sockets raise an error. Ready callbacks run in one of two orders:

- `fifo`: in the order in which they became ready, as asyncio guarantees. Every failure is real.
- `shuffle`: in an order that the seed decides. This finds code that relies on an order that nothing guarantees.

When nothing is ready and no timer is left, the program would wait forever: `Deadlock` names each task and where it
waits.

asyncio keeps tasks in sets, which iterate by hash. So tasks and futures hash by their number here, not by address.
"""

import asyncio
import heapq
from asyncio import base_events
from collections.abc import Callable, Coroutine, Generator
from random import Random
from typing import Any, Literal, NoReturn, TypeVar

T = TypeVar("T")

_STEPS_MAX = 20_000_000


class Deadlock(RuntimeError):  # noqa: N818 -- the common word
    """Nothing is ready, and nothing ever will be."""


class TooManySteps(RuntimeError):  # noqa: N818 -- reads better
    """The program does not end: something polls without waiting."""


class NotInSimulation(RuntimeError):  # noqa: N818 -- reads better
    """The code used a thread, an executor or a socket, which would make two runs of one seed differ."""


class _Task(asyncio.Task[T]):
    def __init__(
        self, coroutine: Generator[Any, None, T] | Coroutine[Any, Any, T], number: int, **options: Any
    ) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[T]):
    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimulationLoop(base_events.BaseEventLoop):
    # The queue of ready handles and the heap of timers are private to BaseEventLoop. They have not changed since the
    # first asyncio, and there is no public way to run a loop without a selector.
    _ready: Any
    _scheduled: list[Any]

    def __init__(
        self, seed: int = 0, *, order: Literal["fifo", "shuffle"] = "fifo", steps_max: int = _STEPS_MAX
    ) -> None:
        super().__init__()
        self.steps = 0
        """Callbacks that ran. The same seed gives the same number."""
        self.gate: Callable[[asyncio.Handle], bool] | None = None
        """Called before a callback runs. False: the gate keeps the callback, and returns it later through `resume`."""
        self.context_for: Callable[[Any], Any] = lambda _: None
        """Returns the context of a new task for its coroutine; None: a copy of the creator's, as usual."""
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
        """Runs a callback that the gate kept."""
        self._ready.append(handle)

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:  # noqa: SLF001 -- see above
            heapq.heappop(scheduled)._scheduled = False  # noqa: SLF001 -- see above
        if not ready:
            if not scheduled:
                raise Deadlock(self._waiting_tasks())
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
            raise TooManySteps(f"{self._steps_max} steps, now at {self._now:.3f} s: {self._waiting_tasks()}")
        handle._run()  # noqa: SLF001 -- see above

    def _waiting_tasks(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        lines = [f"  {task.get_name()} waits {_where(task)}" for task in tasks]
        return "\n".join([f"all tasks wait at {self._now:.3f} s:", *lines])

    # tasks and futures

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

    # not available

    def call_soon_threadsafe(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise NotInSimulation("call_soon_threadsafe: a simulation has no threads")

    def run_in_executor(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise NotInSimulation("run_in_executor: a simulation has no threads; handlers must be async functions")

    def getaddrinfo(self, *_: Any, **__: Any) -> NoReturn:
        raise NotInSimulation("a simulation has no network; give the code a simulated port")

    create_connection = create_server = create_datagram_endpoint = getaddrinfo

    def _process_events(self, _: Any) -> None:
        """Does nothing: there is no selector."""

    def _write_to_self(self) -> None:
        """Does nothing: there is no selector to wake."""


def run(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    seed: int = 0,
    order: Literal["fifo", "shuffle"] = "fifo",
    loop: SimulationLoop | None = None,
) -> T:
    """Runs `main()` in virtual time, then cancels the tasks that it left."""
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
    """Cancels up to twenty times: code may swallow one cancellation that comes at a bad moment, but not all of them."""
    loop.steps = 0
    for _ in range(20):
        tasks = sorted(asyncio.all_tasks(loop), key=hash)
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
    raise RuntimeError("these tasks ignore cancellation: " + ", ".join(task.get_name() for task in tasks))


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line at which a task waits."""
    frames = task.get_stack()
    coroutine: Any = task.get_coro()
    frame = frames[-1] if frames else None
    while (inner := getattr(coroutine, "cr_await", None)) is not None:
        coroutine = inner
        frame = getattr(coroutine, "cr_frame", None) or frame
    if frame is None:
        return "to begin"
    return f"in {frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"

"""Where a call stands at this moment, for the person who asks why it does not end.

The stack of a thread is asked of the interpreter. A coroutine that waits has none: it is followed along what each one
awaits. One that runs is found in the stack of the thread that runs it, since only another thread can ask then. Nothing
is decided by any of this, so what cannot be found is left out.
"""

import asyncio
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, Final

__all__ = ["coroutine_stack", "place_in", "task_stack", "thread_stack"]

_OURS: Final = str(Path(__file__).parent.parent)
_FRAMES_SHOWN: Final = 3

Stack = traceback.StackSummary


def thread_stack(thread_id: int | None) -> Stack:
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001 -- the documented way to another thread
    return _summary(_from_outside(frame))


def task_stack(task: "asyncio.Task[Any] | None") -> Stack:
    return coroutine_stack(None if task is None else task.get_coro())


def coroutine_stack(coroutine: Any) -> Stack:
    """Without frames of the engine before the first of somebody else: they are the same in every call."""
    frames: list[FrameType] = []
    while (frame := _frame_of(coroutine)) is not None:
        frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return _summary([*frames, *_above(frames[-1])] if frames else [])


def place_in(stack: Stack) -> str:
    """The innermost frames on one line: `handle (app.py:12) > query (db.py:90)`."""
    shown = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in stack[-_FRAMES_SHOWN:]]
    return " > ".join(shown) or "a place that is not known"


def _frame_of(coroutine: Any) -> FrameType | None:
    frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
    return frame if isinstance(frame, FrameType) else None


def _from_outside(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _above(frame: FrameType) -> list[FrameType]:
    """What a coroutine that runs has called: nothing, where it waits."""
    for top in sys._current_frames().values():  # noqa: SLF001 -- the documented way to other threads
        frames = _from_outside(top)
        if frame in frames:
            return frames[frames.index(frame) + 1 :]
    return []


def _summary(frames: list[FrameType]) -> Stack:
    foreign = next((n for n, frame in enumerate(frames) if _is_foreign(frame)), 0)
    return Stack.extract((frame, frame.f_lineno) for frame in frames[foreign:])


def _is_foreign(frame: FrameType) -> bool:
    """Not of the engine, nor of what starts threads for it."""
    name = frame.f_code.co_filename
    return not name.startswith(_OURS) and Path(name).name not in {"threading.py", "thread.py"}

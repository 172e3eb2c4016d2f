"""Tracebacks of failed handler calls, for users: they begin where the user's code does."""

from types import FrameType, TracebackType


def handler_traceback(error: BaseException) -> TracebackType | None:
    """From the handler on: without our own frames that called it. If there are no others, with all of them."""
    trace = error.__traceback__
    while trace is not None and module_of(trace.tb_frame).startswith("anabranch."):
        trace = trace.tb_next
    return trace or error.__traceback__


def module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))

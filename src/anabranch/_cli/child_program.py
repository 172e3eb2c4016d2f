"""Runs a program as if we were it: input and output are ours, our signals go to it, its exit code is the result."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from anabranch.errors import ConfigurationError

__all__ = ["run_program"]

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_program(program: Sequence[str], environment: Mapping[str, str]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(*program, env=dict(environment), start_new_session=False)
    except FileNotFoundError:
        raise ConfigurationError(f"there is no program {program[0]!r}") from None
    except OSError as error:
        raise ConfigurationError(f"{program[0]!r} cannot be run: {error.strerror}") from None
    loop = asyncio.get_running_loop()
    for number in _FORWARDED:
        loop.add_signal_handler(number, _forward, process, number)
    try:
        code = await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return code if code >= 0 else 128 - code  # as a shell reports a program that a signal ended


def _forward(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if number == signal.SIGINT and _in_terminal_foreground():
        return  # Ctrl-C reaches the whole process group: the program has it already
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _in_terminal_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False

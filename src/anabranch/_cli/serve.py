"""`anabranch serve`: runs a local Kinesis, alone or for the lifetime of one program."""

import argparse
import asyncio
import contextlib
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from anabranch._cli.options import bounded_integer, bounded_number
from anabranch._cli.output import DONE, flush, say, show
from anabranch.errors import ConfigurationError
from anabranch.local import LocalKinesis

_FORWARDED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def run_program(program: Sequence[str], environment: Mapping[str, str]) -> int:
    try:
        process = await asyncio.create_subprocess_exec(*program, env=environment)
    except FileNotFoundError:
        raise ConfigurationError(f"program not found: {program[0]!r}") from None
    except OSError as error:
        raise ConfigurationError(f"cannot run {program[0]!r}: {error.strerror}") from None
    loop = asyncio.get_running_loop()
    for number in _FORWARDED_SIGNALS:
        loop.add_signal_handler(number, _forward, process, number)
    try:
        code = await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return code if code >= 0 else 128 - code  # after a signal, as shells do


def _forward(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if number == signal.SIGINT and _in_terminal_foreground():
        return  # Ctrl-C reaches the whole process group, including the program
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _in_terminal_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


_PORT: Final = 4567
_EXAMPLES: Final = """\
examples:
  anabranch serve --create orders:4
  anabranch serve --create orders:4 -- python app.py
  anabranch serve --data ./kinesis --limits aws

Prints a line that begins with `ready:` when clients can connect; on a terminal
also the variables to set in other terminals. A PROGRAM gets endpoint, region
and credentials in its environment, and serve returns its exit code. Without
PROGRAM, Ctrl-C and SIGTERM shut the server down gracefully with exit code 0.
"""


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.usage = "anabranch serve [options] [-- PROGRAM ...]"
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run, takes_program=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    port = f"port to listen on; 0 chooses a free one (default: {_PORT}, or 0 with PROGRAM)"
    parser.add_argument("--port", type=bounded_integer("port", 0, 65_535), help=port)
    parser.add_argument(
        "--create", type=_stream_to_create, action="append", default=[], metavar="NAME[:SHARDS]",
        help="create a stream at start (default: one shard); may be repeated",
    )  # fmt: skip
    parser.add_argument("--data", metavar="DIR", help="store streams and records in this folder (default: in memory)")
    salvage = "if --data is damaged: keep the damaged file, and load what is intact"
    parser.add_argument("--salvage", action="store_true", help=salvage)
    parser.add_argument("--limits", choices=("aws", "off"), default="off", help="enforce AWS's quotas (default: off)")
    parser.add_argument("--region", default="us-east-1", help="default: us-east-1")
    parser.add_argument("--account-id", default="000000000000", metavar="ID", help="default: 000000000000")
    delay = "how long streams stay CREATING, UPDATING and DELETING (default: 0)"
    seconds = bounded_number("number of seconds", 0, 86_400)
    parser.add_argument("--state-delay", type=seconds, default=0.0, metavar="SECONDS", help=delay)
    scale = "multiply durations (subscriptions, iterators, retention): 0.01 turns five minutes into three seconds"
    factor = bounded_number("factor", 0.0001, 1_000)
    parser.add_argument("--time-scale", type=factor, default=1.0, metavar="FACTOR", help=scale)
    tls = "serve TLS, with a self-signed certificate unless one is given"
    parser.add_argument("--tls", action="store_true", help=tls)
    parser.add_argument("--certificate", metavar="FILE", help="PEM file; implies --tls")
    key = "PEM file with the private key, if the certificate file does not contain it"
    parser.add_argument("--key", metavar="FILE", help=key)
    parser.add_argument("--seed", type=int, metavar="N", help="seed for random faults")


def _run(arguments: argparse.Namespace) -> int:
    program: list[str] | None = arguments.program
    if program == []:
        raise ConfigurationError("no program after --")
    port = arguments.port if arguments.port is not None else 0 if program else _PORT
    named_alike = {name: vars(arguments)[name] for name in inspect.signature(LocalKinesis).parameters}
    options = {**named_alike, "create": _shards_by_stream(arguments.create), "port": port}
    return asyncio.run(_serve(LocalKinesis(**options), program))


async def _serve(kinesis: LocalKinesis, program: Sequence[str] | None) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with kinesis:
        if program and not stopped.is_set():
            return await run_program(program, {**_inherited_environment(), **kinesis.environment()})
        certificate = "" if kinesis.certificate_path is None else f" certificate {kinesis.certificate_path}"
        show(f"ready: {kinesis.endpoint_url} region {kinesis.region}{certificate}")
        flush()
        if sys.stdout.isatty() and sys.stderr is not None and sys.stderr.isatty():
            exports = [f"export {name}={shlex.quote(value)}" for name, value in kinesis.environment().items()]
            for line in ("", "To use it in another terminal, run:", *exports, "", "Ctrl-C stops the server."):
                say(line)
        await stopped.wait()
    return DONE


def _inherited_environment() -> dict[str, str]:
    """Our environment, without variables that would override the local endpoint or credentials."""
    overriding = {"AWS_SESSION_TOKEN", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"}
    return {name: value for name, value in os.environ.items() if name not in overriding}


def _shards_by_stream(streams: list[tuple[str, int]]) -> dict[str, int]:
    names = [name for name, _ in streams]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"--create was passed more than once for {', '.join(twice)}")
    return dict(streams)


def _stream_to_create(text: str) -> tuple[str, int]:
    name, colon, shards = text.partition(":")
    if not name or (colon and not (shards.isascii() and shards.isdigit() and int(shards) > 0)):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME:SHARDS, such as orders:4")
    return name, int(shards) if colon else 1

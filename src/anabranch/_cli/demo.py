"""`anabranch demo`: the whole product on this machine, without an AWS account, in about a minute."""

import argparse
import asyncio
import os
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from anabranch._cli.options import add_json_option, bounded_integer, bounded_number
from anabranch._cli.output import DONE, FAILED, CommandFailed, make_console, print_json
from anabranch.errors import ConfigurationError

_EXAMPLES: Final = """\
examples:
  anabranch demo
  anabranch demo --seed 7 --seconds 20
  anabranch demo --fanout
  anabranch demo --json | jq .ours

Splits and merges shards and kills a worker while records flow. On a terminal,
s splits, m merges, k kills, t throttles, q ends. The exit code is 1 if the
anabranch column of the audit shows a lost or misordered record.
"""


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run)
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the run (default: random)")
    seconds = bounded_number("number of seconds", 1, 3_600)
    parser.add_argument("--seconds", type=seconds, default=36.0, help="how long records are written (default: 36)")
    rate = bounded_integer("number of records", 1, 2_000)
    parser.add_argument("--rate", type=rate, default=250, metavar="N", help="records per second (default: 250)")
    parser.add_argument("--fanout", action="store_true", help="the workers read with enhanced fan-out")
    add_json_option(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="save the final view as an SVG file")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.picture is not None:
        _check_picture(arguments.picture)
    return asyncio.run(_until_signalled(_perform(arguments)))


def _check_picture(path: Path) -> None:
    """The demo takes a minute, so a path that cannot be written is refused before it starts."""
    if path.is_dir():
        raise ConfigurationError(f"--picture: {path} is a folder; name a file, such as {path / 'demo.svg'}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--picture: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"--picture: no permission to write {path}")


async def _perform(arguments: argparse.Namespace) -> int:
    from anabranch._demo.show import perform

    audit, picture = await perform(
        seed=arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000),
        seconds=arguments.seconds,
        rate=arguments.rate,
        fanout=arguments.fanout,
        console=make_console(stderr=arguments.json),
        shows_audit=not arguments.json,
    )
    if arguments.json:
        print_json(audit)
    if arguments.picture is not None:
        try:
            arguments.picture.write_text(picture)
        except OSError as error:
            raise CommandFailed(f"cannot write {arguments.picture}: {error.strerror}") from None
    return DONE if audit.is_clean else FAILED


async def _until_signalled(performance: Coroutine[Any, Any, int]) -> int:
    """SIGTERM and SIGHUP (a closed terminal) end the demo as Ctrl-C does: nothing is left behind."""
    received: list[int] = []
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await performance
    except asyncio.CancelledError:
        if not received:
            raise
        task.uncancel()
        return 128 + received[0]  # the shell's exit code for a signal

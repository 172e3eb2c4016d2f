"""`anabranch top APP`: watches an application live; prints plain frames if there is no terminal."""

import argparse
import asyncio
import sys
import time
from typing import TYPE_CHECKING, Final

from anabranch._cli.fleet_tables import fleet_lines, headline
from anabranch._cli.options import add_application_argument, bounded_number
from anabranch._cli.output import DONE, make_console, styled

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from anabranch.application import Application
    from anabranch.reports import FleetStatus

_INTERVAL_WITHOUT_WAIT: Final = 10.0

_EXAMPLES: Final = """\
examples:
  anabranch top billing
  anabranch top billing --leases sqlite:///var/lib/billing.db
  anabranch top billing --once
  anabranch top billing --json --interval 10 >> billing.jsonl

Stalled shards come first, with the reason. q or Ctrl-C quits. BEAT is the time
since the worker's last heartbeat, COMMITTED since the last checkpoint.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_application_argument(parser)
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--interval",
        type=bounded_number("number of seconds", 0.1, 3_600),
        default=1.0,
        metavar="SECONDS",
        help="between updates (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per update")


def run(arguments: argparse.Namespace) -> int:
    asyncio.run(_watch(arguments))
    return DONE


async def _watch(arguments: argparse.Namespace) -> None:
    from anabranch.application import Application

    console = make_console()
    async with Application(arguments.app, leases=arguments.leases) as application:
        if arguments.json or arguments.once or not console.is_terminal:
            await _print(application, arguments, console)
        else:
            await _draw(application, arguments, console)


async def _print(application: "Application", arguments: argparse.Namespace, console: "Console") -> None:
    import msgspec

    while True:
        status = await application.status(watch=_waits(arguments))
        if arguments.json:
            print(msgspec.json.encode(status).decode())
        else:
            for line in _frame(status):
                console.print(line)
        sys.stdout.flush()
        if arguments.once:
            return
        await asyncio.sleep(arguments.interval)
        if not arguments.json:
            print()


def _waits(arguments: argparse.Namespace) -> bool:
    """Whether to wait for new reports. With a short interval, the next frame has them."""
    return bool(arguments.once) or arguments.interval > _INTERVAL_WITHOUT_WAIT


async def _draw(application: "Application", arguments: argparse.Namespace, console: "Console") -> None:
    from rich.console import Group
    from rich.live import Live

    from anabranch._demo.keyboard import listen
    from anabranch.errors import LeaseStoreError

    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    shown: list[Text] = []
    with (
        listen(loop.add_reader, lambda key: over.set() if key in {"q", "Q"} else None) as has_keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not over.is_set():
            try:
                shown = _frame(await application.status(watch=_waits(arguments)), height=console.height)
            except LeaseStoreError as error:  # retried at the next update
                shown = [*shown[: console.height - 1], styled(" ".join(str(error).split()), "red")]
            live.update(Group(*shown), refresh=True)
            try:
                async with asyncio.timeout(arguments.interval):
                    await over.wait()
            except TimeoutError:
                continue
        if has_keys:
            loop.remove_reader(sys.stdin.fileno())


def _frame(status: "FleetStatus", *, height: int | None = None) -> list["Text"]:
    title = styled(status.app, "bold").append(f"  {', '.join(status.streams)}  ", "dim")
    title.append(time.strftime("%H:%M:%S"), "dim")
    head = [title, styled(headline(status)), styled("")]
    return head + fleet_lines(status, height=None if height is None else height - len(head))

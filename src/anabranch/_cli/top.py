"""`anabranch top APP`: watches an application live; prints plain frames if there is no terminal."""

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from anabranch._cli.connection import ask_application
from anabranch._cli.fleet_tables import fleet_lines, fleet_sections, headline, status_document
from anabranch._cli.options import add_application_argument, bounded_number
from anabranch._cli.output import clean, flush, json_text, make_console, one_line, say, show, styled, wrapped
from anabranch.errors import LeaseStoreError

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

Stalled shards come first, with the reason. q or Ctrl-C quits; the arrow keys,
page up and page down scroll. HEARTBEAT is the time since the worker's last
heartbeat, COMMITTED since the last checkpoint, BEHIND the age of the oldest
unfinished record.
"""


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run)
    add_application_argument(parser)
    parser.add_argument("--once", action="store_true", help="print once and exit")
    seconds = bounded_number("number of seconds", 0.1, 3_600)
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="SECONDS", help="between updates (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per update")


def _run(arguments: argparse.Namespace) -> None:
    console = make_console()
    watch = _print if arguments.json or arguments.once or not console.is_terminal else _draw
    ask_application(arguments, lambda application: watch(application, arguments, console))


async def _print(application: "Application", arguments: argparse.Namespace, console: "Console") -> None:
    while True:
        try:
            status = await application.status(watch=_waits(arguments))
        except LeaseStoreError as error:
            if arguments.once:
                raise
            say(one_line(error))  # retried at the next update
        else:
            if arguments.json:
                show(json_text(status_document(status)))
            else:
                console.print(*_head(status, console), *fleet_lines(status, console), sep="\n")
                if not arguments.once:
                    show()  # between frames
            flush()
        if arguments.once:
            return
        await asyncio.sleep(arguments.interval)


def _waits(arguments: argparse.Namespace) -> bool:
    """Whether to wait for new reports. With a short interval, the next frame has them."""
    return bool(arguments.once) or arguments.interval > _INTERVAL_WITHOUT_WAIT


class Scroll:
    """Which lines of a frame that is longer than the terminal are shown."""

    def __init__(self) -> None:
        self.first = 0
        self._last_first = 0
        self._height = 1

    def on_key(self, key: str) -> None:
        page = max(1, self._height - 1)
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page, " ": page}
        if key in {"home", "g"}:
            self.first = 0
        elif key in {"end", "G"}:
            self.first = self._last_first
        else:
            self.first = min(self._last_first, max(0, self.first + steps.get(key, 0)))

    def view(self, head: list["Text"], sections: list[list["Text"]], height: int) -> list["Text"]:
        """The head, and below it the lines of the sections that fit. If some do not fit, the last line says which lines
        are shown, and the headings of the section that scrolls (its first line) stay on top.
        """
        body = [line for section in sections for line in section]
        self._height = max(1, height - len(head))
        if len(body) <= self._height:
            self.first = self._last_first = 0
            return head + body
        self._height = max(1, self._height - 1)
        self._last_first = len(body) - self._height
        self.first = min(self.first, self._last_first)
        until = self.first + self._height
        place = f"lines {self.first + 1} to {until} of {len(body)}; arrow keys, page up and page down scroll, q quits"
        tops = [section[0] for section in sections for _ in section]
        return [*head, tops[self.first], *body[self.first + 1 : until], styled(place, "dim")]


async def _draw(application: "Application", arguments: argparse.Namespace, console: "Console") -> None:
    """Redraws the status at each update and at each key."""
    from rich.console import Group
    from rich.live import Live

    from anabranch._demo.keyboard import listen

    loop, scroll = asyncio.get_running_loop(), Scroll()
    pressed, over = asyncio.Event(), asyncio.Event()

    def on_key(key: str) -> None:
        if key in {"q", "Q"}:
            over.set()
        scroll.on_key(key)
        pressed.set()

    status: FleetStatus | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live, listen(on_key):
        while not over.is_set():
            failure = []
            try:
                status = await application.status(watch=_waits(arguments))
            except LeaseStoreError as error:  # retried at the next update
                failure = [styled(one_line(error), "red")]
            until = loop.time() + arguments.interval
            while (left := until - loop.time()) > 0 and not over.is_set():
                pressed.clear()
                head = [] if status is None else _head(status, console)
                sections = [] if status is None else fleet_sections(status, console)
                live.update(Group(*scroll.view(head + failure, sections, console.height)), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pressed.wait(), left)


def _head(status: "FleetStatus", console: "Console") -> list["Text"]:
    title = styled("").append(clean(status.app), "bold").append(clean(f"  {', '.join(status.streams)}  "), "dim")
    title.append(time.strftime("%H:%M:%S"), "dim")
    return [title, *map(styled, wrapped(headline(status), console)), styled("")]

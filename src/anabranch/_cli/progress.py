"""What is shown while a command waits, on standard error: a bar on terminals, else a line when something changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anabranch._cli.output import make_console, say

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Report", "progress"]

Report = Callable[[float, str], None]
"""Takes how much of the whole is done (0 to 1) and what is going on."""


@contextmanager
def progress(title: str) -> Iterator[Report]:
    console = make_console(stderr=True)
    try:
        if console.is_terminal:
            with _bar(title, console) as report:
                yield report
        else:
            yield _LineReport(title)
    except KeyboardInterrupt:
        say(f"{title}: no longer waited for; the service goes on with it")
        raise


@contextmanager
def _bar(title: str, console: "Console") -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda done, text: bars.update(task, completed=done, description=f"{title}: {text}")


class _LineReport:
    def __init__(self, title: str) -> None:
        self._title = title
        self._said: str | None = None

    def __call__(self, done: float, text: str) -> None:  # noqa: ARG002 -- a line has no bar
        if text != self._said:
            self._said = text
            say(f"{self._title}: {text}")

"""What is shown while a command waits: a bar on terminals, else a line whenever something changes. On standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anabranch._cli.output import make_console, say

__all__ = ["Report", "progress"]

Report = Callable[[float, str], None]
"""Takes how much of the whole is done (0 to 1) and what is going on."""


@contextmanager
def progress(title: str) -> Iterator[Report]:
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield _LineReport(title)
        return
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

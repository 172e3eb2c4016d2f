"""What happens to undelivered records when the interpreter exits.

Blocking producers deliver them in parallel, each within its timeout. The event loops of asynchronous producers are
gone, so we only log how many records were lost. The exit hook is registered on import. So it runs after the hooks that
the program registers later, which may still put records, and before that of `logging`, so its log lines are written.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable

Hook = Callable[[], None]

_producers: dict[Hook, Hook] = {}
_reports: dict[Hook, None] = {}
_guards: list[threading.Thread] = []


def close_at_exit(begin: Hook, finish: Hook) -> None:
    """`begin` starts to deliver, without waiting. `finish` waits for that, and logs what was not delivered."""
    _producers[begin] = finish
    if _is_child_of_multiprocessing() and not _guards:
        _guards.append(threading.Thread(target=_close_after_other_threads, name="anabranch-exit"))
        _guards[0].start()


def cancel_close_at_exit(begin: Hook) -> None:
    _producers.pop(begin, None)


def report_at_exit(report: Hook) -> None:
    """Keeps the method of a writer with undelivered records, until `cancel_report_at_exit`."""
    _reports[report] = None


def cancel_report_at_exit(report: Hook) -> None:
    _reports.pop(report, None)


def _at_exit() -> None:
    producers = list(_producers.items())
    for begin, _ in producers:
        begin()
    for _, finish in producers:
        finish()
    for report in list(_reports):
        report()


def _is_child_of_multiprocessing() -> bool:
    """Such a process ends by `os._exit`. It joins its threads first, but runs no exit hooks before Python 3.13."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _close_after_other_threads() -> None:
    """Runs in a non-daemon thread: waits for the other ones, which may put records, then runs the exit hook."""
    me = threading.current_thread()
    while others := [
        thread for thread in threading.enumerate() if thread.is_alive() and not thread.daemon and thread is not me
    ]:
        for thread in others:
            thread.join()
    _at_exit()


def _forget() -> None:
    """In a forked child: everything here belongs to the parent."""
    _producers.clear()
    _reports.clear()
    _guards.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

"""What becomes of records that are still on their way when the interpreter ends.

Blocking producers deliver them, all at once and each within its time; of asynchronous ones, whose event loop is over,
the log says how many were lost. The hook is registered on import, so it runs after the hooks that a program registers
later: they may still put records. The hook of `logging` is older, so what is logged here is written.
"""

import atexit
import os
import sys
import threading
from typing import Protocol


class EndsAtExit(Protocol):
    def begin_exit(self) -> None:
        """Starts to deliver; does not wait."""

    def finish_exit(self) -> None:
        """Waits for the end, and logs what was not delivered."""


class TellsAtExit(Protocol):
    def tell_unfinished(self) -> None:
        """Logs what was not delivered."""


_producers: dict[int, EndsAtExit] = {}
_writers: dict[int, TellsAtExit] = {}
_guards: list[threading.Thread] = []


def end_at_exit(producer: EndsAtExit) -> None:
    _producers[id(producer)] = producer
    if _is_child_of_multiprocessing() and not _guards:
        _guards.append(threading.Thread(target=_end_after_others, name="anabranch-exit"))
        _guards[0].start()


def end_no_more(producer: EndsAtExit) -> None:
    _producers.pop(id(producer), None)


def tell_at_exit(writer: TellsAtExit) -> None:
    """It has something unfinished, and is kept until `tell_no_more`."""
    _writers[id(writer)] = writer


def tell_no_more(writer: TellsAtExit) -> None:
    _writers.pop(id(writer), None)


def _at_exit() -> None:
    producers = list(_producers.values())
    for producer in producers:
        producer.begin_exit()
    for producer in producers:
        producer.finish_exit()
    for writer in list(_writers.values()):
        writer.tell_unfinished()


def _is_child_of_multiprocessing() -> bool:
    """Such a process leaves by `os._exit`. It waits for threads first, but runs no hooks before Python 3.13."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def _end_after_others() -> None:
    """In a thread that the process waits for: the hook, once no other such thread can put records."""
    me = threading.current_thread()
    while others := [
        thread for thread in threading.enumerate() if thread.is_alive() and not thread.daemon and thread is not me
    ]:
        for thread in others:
            thread.join()
    _at_exit()


def _forget() -> None:
    """In a forked child: all of it belongs to the parent."""
    _producers.clear()
    _writers.clear()
    _guards.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

"""`anabranch run module:consumer`: a consumer of the user's, in this process or as a fleet of several."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final

from anabranch._cli.options import positive_integer
from anabranch._cli.output import DONE, FAILED, counted, say
from anabranch._cli.targets import find_consumer
from anabranch._cli.worker_processes import run_workers
from anabranch._engine.lifeline import tie_to
from anabranch.errors import ConfigurationError, ConsumerFailedError, ShardStoppedError

if TYPE_CHECKING:
    from anabranch.consumer import Consumer
    from anabranch.reports import StopReport

__all__ = ["add_arguments", "run"]

_EXAMPLES: Final = """\
examples:
  anabranch run app:consumer
  anabranch run billing.orders:consumer --workers 4
  anabranch serve --create orders:4 -- anabranch run app:consumer

The consumer needs a handler, by @consumer.handler or @consumer.batch_handler().
Ctrl-C and SIGTERM stop it in order: what runs may end, checkpoints are written,
leases are freed; a second one does not wait for handlers. The exit code is 0
then, and 1 if something was left, or if a shard is stopped at a record that
could not be handled. A worker that fails is not started again: the
others take over its shards, and its exit code is the run's in the end. Workers
stop in order, too, when the program that started them is gone.
"""
_FORMAT: Final = "%(asctime)s %(process)d %(levelname)s %(message)s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("target", metavar="MODULE:NAME", help="a Consumer in a module, found from the current folder")
    parser.add_argument(
        "--workers", type=positive_integer, default=1, metavar="N", help="processes that share the work (default: 1)"
    )
    parser.add_argument("--lifeline", type=int, help=argparse.SUPPRESS)  # for the workers themselves
    parser.add_argument(
        "--log", choices=("debug", "info", "warning", "error"), default="info",
        help="what is logged to standard error, unless your module sets up logging (default: info)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    consumer = find_consumer(arguments.target)
    if arguments.workers > 1:
        if not consumer.shares_leases:
            raise ConfigurationError(
                f"--workers {arguments.workers}: {arguments.target} shares no leases, so that each worker would handle "
                "every record; give it app='name', and no leases='memory://'"
            )
        command = [sys.executable, "-m", "anabranch", "run", arguments.target, "--log", arguments.log]
        return asyncio.run(run_workers(command, arguments.workers))
    if arguments.lifeline is not None:
        tie_to(arguments.lifeline, lambda: os.kill(os.getpid(), signal.SIGTERM))
    if not logging.getLogger().handlers:
        logging.basicConfig(format=_FORMAT, level=logging.WARNING)
        logging.getLogger("anabranch").setLevel(arguments.log.upper())
    return _outcome(_run(consumer))


def _run(consumer: "Consumer[Any]") -> "StopReport":
    try:
        return asyncio.run(consumer.run(handle_signals=True))
    except ShardStoppedError as error:
        return error.report
    except ConsumerFailedError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        raise


def _outcome(report: "StopReport") -> int:
    if report.clean:
        return DONE
    for shard in report.stopped:
        say(str(shard))
    if report.stopped:
        say("nothing from there on was handled; fix the cause and run again: a new worker tries the record once more")
    if report.leftovers:
        running = counted(len(report.leftovers), "handler")
        say(f"{running} still ran at the deadline: those records will be handled again")
    if not report.committed:
        say("the lease store took no last checkpoint; what was finished since the one before will be handled again")
    if not report.released:
        say("the lease store did not answer the goodbye; the leases are free after their expiry")
    return FAILED

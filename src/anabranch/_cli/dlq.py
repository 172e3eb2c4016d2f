"""`anabranch dlq ls | show | drop | export | redrive | worker`: the dead letters at a URL."""

import argparse
import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from anabranch._cli.options import (
    Actions,
    add_aws_options,
    add_json_option,
    aws_from,
    bounded_number,
    end_argument,
    positive_integer,
    timestamp,
)
from anabranch._cli.output import (
    DONE,
    FAILED,
    confirm,
    counted,
    flush,
    make_console,
    one_line,
    print_facts,
    print_json,
    print_table,
    progress,
    say,
    show,
    show_lines,
    wrapped,
)
from anabranch._cli.run import add_log_option, configure_logging, find_consumer
from anabranch.errors import ConfigurationError

if TYPE_CHECKING:
    from anabranch.dead_letters import DeadLetters, LetterFilter, LetterGroup, RedriveReport
    from anabranch.letters import Letter

T = TypeVar("T")

_EXAMPLES: Final = """\
examples:
  anabranch dlq ls sqs://billing-failures
  anabranch dlq show sqs://billing-failures 3fa9c1
  anabranch dlq drop sqs://billing-failures --letter 3fa9c1
  anabranch dlq export sqs://billing-failures letters.jsonl
  anabranch dlq redrive sqs://billing-failures app:consumer --dry-run
  anabranch dlq redrive sqs://billing-failures app:consumer --rate 10
  anabranch dlq redrive sqs://billing-failures --to-stream
  anabranch dlq worker app:consumer sqs://billing-failures --review sqs://review

URL is sqs://NAME, s3://bucket/prefix or sqlite:///path, as in DeadLetter(URL).
"""
_MESSAGE_COLUMNS: Final = 200
_PAYLOAD_SHOWN: Final = 2_000
_LETTER_DIGITS: Final = 12


def add_dlq(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser, _EXAMPLES)
    ls = actions.add("ls", _ls, "list dead letters, grouped by failure")
    ls.add_argument("--letters", action="store_true", help="list each letter instead of groups")
    one = actions.add("show", _show, "show one dead letter")
    drop = actions.add("drop", _drop, "delete dead letters permanently")
    drop.add_argument("--all", action="store_true", help="drop all letters; required if no filter is given")
    drop.add_argument("--yes", action="store_true", help="delete without asking")
    export = actions.add("export", _export, "write dead letters to a file, as lines of JSON")
    redrive = actions.add("redrive", _redrive, "deliver dead letters again")
    worker = actions.add("worker", _worker, "deliver dead letters again as they arrive")
    worker.add_argument("target", metavar="MODULE:NAME", help="a Consumer with a handler")
    for action in (ls, one, drop, export, redrive, worker):
        action.add_argument("url", metavar="URL", help="sqs://NAME, s3://bucket/prefix or sqlite:///path")
    one.add_argument("letter", metavar="LETTER", help="the first digits of its idempotency key")
    export.add_argument("file", metavar="FILE", help="a new file")
    redrive.add_argument("target", metavar="MODULE:NAME", nargs="?", help="a Consumer: its handler gets the records")
    to_stream = "put the records back into their stream, or into STREAM"
    redrive.add_argument("--to-stream", nargs="?", const="", metavar="STREAM", help=to_stream)
    redrive.add_argument("--dry-run", action="store_true", help="only count the letters")
    for action in (redrive, worker):
        _add_redrive_options(action)
    idle = bounded_number("number of seconds", 0.1, 3600)
    pause = "pause when there are no letters (default: 5)"
    worker.add_argument("--idle", type=idle, default=5.0, metavar="SECONDS", help=pause)
    add_log_option(worker)
    for action in (ls, drop, export, redrive):
        _add_filters(action)
    for action in (ls, one, redrive):
        add_json_option(action)
    for action in (ls, one, drop, export, redrive, worker):
        add_aws_options(action)


def _add_redrive_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--review", metavar="REVIEW_URL", help="destination of letters that fail again")
    calls = "calls per letter (default: 3)"
    parser.add_argument("--attempts", type=positive_integer, default=3, metavar="N", help=calls)
    backoff = bounded_number("number of seconds", 0, 3600)
    pause = "longest pause before the second call; doubles with each call (default: 1)"
    parser.add_argument("--backoff", type=backoff, default=1.0, metavar="SECONDS", help=pause)
    rate = bounded_number("rate", 0.001, 1e6)
    parser.add_argument("--rate", type=rate, metavar="N", help="letters per second at most")
    keys = "partition keys delivered concurrently (default: 8)"
    parser.add_argument("--concurrency", type=positive_integer, default=8, metavar="N", help=keys)


def _add_filters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("filters", "a letter must match all filters")
    group.add_argument("--fingerprint", metavar="DIGITS", help="of the failure; the first digits are enough")
    group.add_argument("--key", help="the partition key")
    group.add_argument("--letter", metavar="DIGITS", help="the first digits of the idempotency key")
    group.add_argument("--since", type=end_argument, metavar="TIME", help="written then or later: -1h, or an ISO time")
    group.add_argument("--until", type=end_argument, metavar="TIME", help="written before this time")


def _where(arguments: argparse.Namespace) -> "LetterFilter":
    from anabranch.dead_letters import LetterFilter

    since, until = arguments.since, arguments.until
    return LetterFilter(
        fingerprint=arguments.fingerprint,
        key=arguments.key,
        letter=arguments.letter,
        since_seconds=None if since is None else since.timestamp(),
        until_seconds=None if until is None else until.timestamp(),
    )


def _with_letters(arguments: argparse.Namespace, work: "Callable[[DeadLetters], Coroutine[Any, Any, T]]") -> T:
    from anabranch.dead_letters import DeadLetters

    if arguments.url.startswith("sqs:"):
        say("reading a queue hides its messages for a moment, and raises their receive counts")

    async def main() -> T:
        async with DeadLetters(arguments.url, aws=aws_from(arguments)) as letters:
            result = await work(letters)
            if letters.unreadable:
                skipped = counted(len(letters.unreadable), "item")
                say(f"{skipped} skipped, not a readable letter: {letters.unreadable[0]}")
            return result

    return asyncio.run(main())


def _ls(arguments: argparse.Namespace) -> None:
    where = _where(arguments)
    found: Sequence[Any]
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    if arguments.letters:
        letters = _with_letters(arguments, lambda box: _collect(box, where))
        found = [_document(letter, whole=False) for letter in letters]
        headings, right = ("LETTER", "WRITTEN", "KEY", "CALLS", "REDRIVEN", "FAILURE"), ("CALLS", "REDRIVEN")
        rows = [
            (
                letter.idempotency_key[:_LETTER_DIGITS], _time(letter.written_seconds, "seconds"),
                letter.partition_key or "-", str(letter.attempts), str(letter.redrive_count), _brief(letter),
            )
            for letter in letters
        ]  # fmt: skip
    else:
        found = groups = _with_letters(arguments, lambda box: box.groups(where))
        headings, right = ("LETTERS", "KEYS", "LAST", "FINGERPRINT", "FAILURE"), ("LETTERS", "KEYS")
        rows = [
            (
                str(group.count), str(group.keys), _time(group.last_seconds, "seconds"), group.fingerprint,
                _brief(group),
            )
            for group in groups
        ]  # fmt: skip
    if arguments.json:
        print_json(found)
    elif rows:
        print_table(headings, rows, right=right)
    else:
        say("no letters")


async def _collect(box: "DeadLetters", where: "LetterFilter") -> "list[Letter]":
    return [msgspec.structs.replace(letter, payload=None, stack="") async for letter in box.letters(where)]


def _time(seconds: float, precision: str = "milliseconds") -> str:
    """A letter may have any content, so not every number is a valid time."""
    try:
        return timestamp(seconds, precision)
    except (ValueError, OverflowError, OSError):
        return "-"


def _brief(failed: "Letter | LetterGroup") -> str:
    text = one_line(f"{failed.error_type}: {failed.message}" if failed.message else failed.error_type)
    return text if len(text) <= _MESSAGE_COLUMNS else f"{text[:_MESSAGE_COLUMNS]}..."


def _document(letter: "Letter", *, whole: bool) -> dict[str, Any]:
    """The fields of the stored letter, so that a script sees the same names everywhere."""
    from anabranch.letters import encode_letter

    fields: dict[str, Any] = msgspec.json.decode(encode_letter(letter))
    return fields if whole else {name: fields[name] for name in fields if name not in {"payload", "stack"}}


def _show(arguments: argparse.Namespace) -> None:
    letter = _with_letters(arguments, lambda box: box.get(arguments.letter))
    if arguments.json:
        print_json(_document(letter, whole=True))
        return
    print_facts(
        [
            ("letter", letter.idempotency_key),
            ("application", letter.app),
            ("shard", f"{letter.stream}/{letter.shard_id}"),
            ("record", letter.position),
            ("key", letter.partition_key or "unknown: the record was trimmed from the stream"),
            ("arrived", "-" if letter.arrival_seconds is None else _time(letter.arrival_seconds)),
            ("written", _time(letter.written_seconds) + (" by a new owner" if letter.recovered else "")),
            ("calls", f"{letter.attempts}: {', '.join(map(_time, letter.attempted_seconds)) or 'times unknown'}"),
            ("redriven", str(letter.redrive_count)),
            ("fingerprint", letter.fingerprint),
            ("failure", _brief(letter)),
        ]
    )
    if letter.stack:
        show()
        for line in letter.stack.rstrip("\n").split("\n"):
            show(f"  {line}")  # no line looks like a field
    show()
    if letter.payload is not None:
        shown = letter.payload[:_PAYLOAD_SHOWN].decode("utf-8", "backslashreplace")
        more = "" if len(letter.payload) <= _PAYLOAD_SHOWN else " (the beginning; --json has all)"
        show(f"payload, {counted(len(letter.payload), 'byte')}{more}: {shown}")
    elif letter.overflow is not None:
        text = f"no payload: {one_line(letter.overflow)} is gone, or is not a letter"
        show_lines(wrapped(text, make_console()))
    else:
        show("no payload: it was trimmed from the stream, or redacted")


def _drop(arguments: argparse.Namespace) -> None:
    from anabranch.dead_letters import LetterFilter

    where = _where(arguments)
    if where == LetterFilter() and not arguments.all:
        raise ConfigurationError("say which letters: give a filter such as --letter or --fingerprint, or --all")
    if not arguments.yes:
        found = _with_letters(arguments, lambda box: _collect(box, where))
        if not found:
            say("no letters")
            return
        confirm(f"Delete {counted(len(found), 'letter')} of {arguments.url} permanently?", yes=False)
    count = _with_letters(arguments, lambda box: box.delete(where))
    show(f"{counted(count, 'letter')} deleted")


def _export(arguments: argparse.Namespace) -> None:
    path = Path(arguments.file)
    if path.exists():
        raise ConfigurationError(f"{path} exists: name a new file")
    configure_logging("warning")
    try:
        count = _with_letters(arguments, lambda box: box.export(path, _where(arguments)))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    show(f"{counted(count, 'letter')} written to {path}")


def _redrive_options(arguments: argparse.Namespace) -> dict[str, Any]:
    from anabranch.policies import Retry

    backoff: float = arguments.backoff
    policy = Retry(attempts=arguments.attempts, backoff=backoff, backoff_max=max(60.0, backoff))
    return {"policy": policy, "review": arguments.review, "rate": arguments.rate}


def _redrive(arguments: argparse.Namespace) -> int:
    if (arguments.target is None) == (arguments.to_stream is None):
        raise ConfigurationError("say where the records go: MODULE:NAME (to its handler), or --to-stream")
    consumer = None if arguments.target is None else find_consumer(arguments.target)
    is_terminal = make_console(stderr=True).is_terminal
    configure_logging("error" if is_terminal else "warning")
    options = {**_redrive_options(arguments), "where": _where(arguments), "dry_run": arguments.dry_run}

    async def work(box: "DeadLetters") -> "tuple[RedriveReport, bool]":
        total = await box.count()
        with progress("redriving") as tell:

            def on_progress(report: "RedriveReport") -> None:
                done = report.delivered + report.reviewed + report.failed + report.held_back + report.without_payload
                if is_terminal or done == total or done % max(1, total // 10) == 0:
                    tell(done / max(total, done, 1), f"{done} of about {max(total, done)}")

            stop = _stop_on_signals()
            options.update(stop=stop, on_progress=on_progress)
            if consumer is None:
                report = await box.put_back(arguments.to_stream or None, **options)
            else:
                report = await box.redrive(consumer, concurrency=arguments.concurrency, **options)
            return report, stop.is_set()

    report, is_stopped = _with_letters(arguments, work)
    if arguments.json:
        print_json(report)
    elif arguments.dry_run:
        show(f"{counted(report.matched, 'letter')} would be redriven")
    else:
        _tell(report, is_stopped=is_stopped)
    return DONE if arguments.dry_run or (report.is_complete and not is_stopped) else FAILED


def _tell(report: "RedriveReport", *, is_stopped: bool) -> None:
    parts = [
        (report.delivered, "delivered"),
        (report.reviewed, "failed again and moved to review"),
        (report.failed, "failed again and kept"),
        (report.held_back, "kept, behind a failed letter of the same key"),
        (report.without_payload, "kept, without a payload"),
    ]
    told = ", ".join(f"{count} {what}" for count, what in parts if count)
    console = make_console()
    show_lines(wrapped(f"{counted(report.matched, 'letter')}: {told}" if told else "no letters", console))
    if report.last_error is not None:
        show_lines(wrapped(f"the last failure: {one_line(report.last_error)[:_MESSAGE_COLUMNS]}", console))
    if is_stopped:
        say("stopped; run the same command again to continue")


def _stop_on_signals() -> asyncio.Event:
    """The first Ctrl-C lets running calls finish. The second kills the process; the next redrive continues there."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        stop.set()
        say("finishing the letters that are being delivered; a second signal ends at once")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # otherwise the exit would wait for calls in threads

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


def _worker(arguments: argparse.Namespace) -> None:
    consumer = find_consumer(arguments.target)
    configure_logging(arguments.log, arguments.log_format)

    async def work(box: "DeadLetters") -> None:
        say(f"redriving {arguments.url} until Ctrl-C or SIGTERM")
        await box.work(
            consumer,
            concurrency=arguments.concurrency,
            idle=arguments.idle,
            stop=_stop_on_signals(),
            **_redrive_options(arguments),
        )

    _with_letters(arguments, work)
    flush()

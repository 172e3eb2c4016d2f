"""`anabranch apps ls | show | scale | skip | resume | delete | copy`: the applications of a lease store."""

import argparse
import asyncio
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

import msgspec

from anabranch._cli.connection import ask_application
from anabranch._cli.fleet_tables import fleet_lines, headline, status_document
from anabranch._cli.options import (
    DEFAULT_LEASES,
    Actions,
    add_application_argument,
    add_json_option,
    add_leases_option,
    ago,
    application_argument,
    bounded_integer,
    bounded_number,
    shard_id_argument,
    timestamp,
)
from anabranch._cli.output import (
    DONE,
    FAILED,
    CommandFailed,
    confirm,
    counted,
    make_console,
    one_line,
    print_json,
    print_table,
    say,
    show,
    show_lines,
    styled,
    wrapped,
)
from anabranch.errors import AnabranchError, LeaseStoreInvalidError

if TYPE_CHECKING:
    from anabranch.application import Application
    from anabranch.reports import CommandResult, FleetStatus
    from anabranch.stores.catalogue import StoredApplication

_EXAMPLES: Final = """\
examples:
  anabranch apps ls
  anabranch apps show billing
  anabranch apps show billing --leases sqlite:///var/lib/billing.db --json
  anabranch apps show billing --leases dynamodb://
  anabranch apps scale billing --target-lag 30 --json
  anabranch apps ls --leases redis://cache.internal/0
  anabranch apps skip billing 3 49590338271490256608559692538361571095
  anabranch apps resume billing 3
  anabranch apps delete billing
  anabranch apps copy billing --from sqlite:///srv/billing.db --to dynamodb://

`anabranch top APP` watches an application live, `anabranch explain APP` says
why a shard is stalled.
"""

_COMMANDS_SHOWN: Final = 5


class ListedApplicationDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An application as `ls --json` prints it."""

    app: str
    leases: str
    streams: tuple[str, ...] = ()
    live_member_count: int = 0
    unfinished_shard_count: int = 0
    stalled_shard_count: int = 0
    lag: float | None = None
    millis_behind_latest: int | None = None
    records_per_second: float = 0.0
    error: str | None = None
    """Why its status could not be read; None if it was."""


def add_apps(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser, _EXAMPLES)
    ls = actions.add("ls", _ls, "list the applications of a lease store, or of this machine")
    add_leases_option(ls, "a lease store", default="ANABRANCH_LEASES, else all lease files on this machine")
    show = actions.add("show", _show, "show an application's workers and shards")
    add_application_argument(show)
    skip = actions.add("skip", _change, "skip a record that keeps failing")
    resume = actions.add("resume", _change, "retry the record at which a shard is stopped")
    for action in (skip, resume):
        add_application_argument(action)
        action.add_argument("shard", type=shard_id_argument, metavar="SHARD", help="id of a shard, or its number alone")
        action.add_argument("--stream", metavar="NAME", help="required if several streams have this shard id")
    position = "the record's sequence number, or SEQUENCE:SUB in an aggregate, as `anabranch explain` shows it"
    skip.add_argument("position", metavar="SEQUENCE", help=position)
    delete = actions.add("delete", _delete, "delete an application: its leases and checkpoints")
    add_application_argument(delete)
    delete.add_argument("--yes", action="store_true", help="delete without asking")
    copy = actions.add("copy", _copy, "move a stopped application to another lease store")
    copy.add_argument("app", type=application_argument, metavar="APP", help="an application whose workers are stopped")
    current = f"its current lease store (default: {DEFAULT_LEASES})"
    copy.add_argument("--from", dest="leases", metavar="URL", help=current)
    copy.add_argument("--to", dest="target", metavar="URL", required=True, help="its new lease store")
    scale = actions.add("scale", _scale, "compute how many workers an application should have")
    add_application_argument(scale)
    seconds, workers = bounded_number("number of seconds", 0.1, 604_800), bounded_integer("number", 0, 10_000)
    lag = "if the lag is larger, advise more workers (default: 60)"
    scale.add_argument("--target-lag", type=seconds, default=60.0, metavar="SECONDS", help=lag)
    time = "time in which the advised workers catch up (default: 300)"
    scale.add_argument("--catch-up", type=seconds, default=300.0, metavar="SECONDS", help=time)
    rate = "records per second of one busy worker; without it, fewer workers are advised only while none arrive"
    records = bounded_number("number of records", 0.001, 1e9)
    scale.add_argument("--worker-rate", type=records, metavar="RECORDS", help=rate)
    scale.add_argument("--min", type=workers, default=1, metavar="N", help="fewest workers to advise (default: 1)")
    scale.add_argument("--max", type=workers, metavar="N", help="most workers to advise")
    for action in (ls, show, scale, skip, resume):
        add_json_option(action)


def _ls(arguments: argparse.Namespace) -> int:
    found = asyncio.run(_list(arguments.leases))
    if arguments.json:
        print_json(found)
    elif found:
        rows = [
            (
                one.app,
                ", ".join(one.streams),
                str(one.live_member_count),
                str(one.unfinished_shard_count),
                styled(str(one.stalled_shard_count), "red" if one.stalled_shard_count else ""),
                ago(one.lag),
                one.leases,
            )
            if one.error is None
            else (one.app, *["?"] * 5, one.leases)
            for one in found
        ]
        headings = ("APP", "STREAMS", "WORKERS", "SHARDS", "STALLED", "BEHIND", "LEASES")
        print_table(headings, rows, right=("WORKERS", "SHARDS", "STALLED", "BEHIND"))
        for one in found:
            if one.error is not None:
                say(f"{one.app}: {one.error}")
    else:
        from anabranch.stores.urls import shown_url

        place = shown_url(arguments.leases) if arguments.leases else "the lease files of this machine"
        say(f"no applications in {place}: Consumer(..., app=NAME) creates one")
    return FAILED if any(one.error is not None for one in found) else DONE


async def _list(leases: str | None) -> list[ListedApplicationDocument]:
    from anabranch.application import Application
    from anabranch.stores.catalogue import stored_applications
    from anabranch.stores.urls import shown_url

    async def look(stored: "StoredApplication") -> ListedApplicationDocument:
        try:
            async with Application(stored.app, leases=stored.leases) as application:
                status = await application.status(watch=True)
        except AnabranchError as error:
            return ListedApplicationDocument(app=stored.app, leases=shown_url(stored.leases), error=one_line(error))
        return ListedApplicationDocument(
            app=stored.app,
            leases=shown_url(stored.leases),
            streams=status.streams,
            live_member_count=len(status.live_members),
            unfinished_shard_count=len(status.unfinished_shards),
            stalled_shard_count=len(status.stalled_shards),
            lag=status.lag,
            millis_behind_latest=status.millis_behind_latest,
            records_per_second=status.records_per_second,
        )

    # Concurrently, because each call waits for the workers' reports.
    return await asyncio.gather(*(look(stored) for stored in await stored_applications(leases, os.environ)))


def _show(arguments: argparse.Namespace) -> None:
    async def read(application: "Application") -> "tuple[FleetStatus, tuple[CommandResult, ...]]":
        return await application.status(watch=True), await application.commands()

    status, commands = ask_application(arguments, read)
    if arguments.json:
        print_json(status_document(status))
        return
    console = make_console()
    show_lines([*wrapped(f"{status.app}: {headline(status)}", console), ""])
    console.print(*fleet_lines(status, console), sep="\n")
    for command in commands[-_COMMANDS_SHOWN:]:
        what = " ".join(filter(None, (command.action, command.shard_id, command.position)))
        outcome = ", ".join(filter(None, (command.state, command.result)))
        text = f"{timestamp(command.requested_seconds)} {command.requested_by}: {what}: {outcome}"
        show_lines(wrapped(text, console, hanging="    "))


def _scale(arguments: argparse.Namespace) -> None:
    advice = ask_application(
        arguments,
        lambda application: application.desired_workers(
            target_lag=arguments.target_lag,
            catch_up=arguments.catch_up,
            worker_rate=arguments.worker_rate,
            minimum=arguments.min,
            maximum=arguments.max,
        ),
    )
    if arguments.json:
        print_json(advice)
    else:
        show(f"{arguments.app}: {counted(advice.workers, 'worker')}, now {advice.live_workers} ({advice.why})")


def _change(arguments: argparse.Namespace) -> int:
    """`skip` and `resume`."""
    shard_id, stream = arguments.shard, arguments.stream

    def ask(application: "Application") -> "Coroutine[Any, Any, CommandResult]":
        if arguments.action == "skip":
            return application.skip(shard_id, arguments.position, stream=stream)
        return application.resume(shard_id, stream=stream)

    command = ask_application(arguments, ask)
    if arguments.json:
        print_json(command)
    elif command.state == "applied":
        show(f"{arguments.app}/{command.shard_id}: {command.result}")
    else:
        raise CommandFailed(f"{command.action} {command.shard_id} was {command.state}: {command.result}")
    return DONE if command.state == "applied" else FAILED


def _delete(arguments: argparse.Namespace) -> None:
    try:
        status = ask_application(arguments, lambda application: application.status())
    except LeaseStoreInvalidError as error:
        if error.code != "half_deleted":
            raise
        confirm(f"Delete the rows that an earlier deletion of {arguments.app!r} left behind?", yes=arguments.yes)
    else:
        confirm(
            f"Delete application {status.app!r} (created {timestamp(status.created_seconds)}) and its checkpoints for "
            f"{counted(len(status.shards), 'shard')} of {', '.join(status.streams) or 'no stream'}?",
            yes=arguments.yes,
        )
        if live := status.live_members:
            say(
                f"waiting up to {max(member.expiry for member in live):.0f} s to see whether these workers still send "
                f"heartbeats: {', '.join(member.worker_id for member in live)}"
            )
    ask_application(arguments, lambda application: application.delete())
    show(f"{arguments.app}: deleted")


def _copy(arguments: argparse.Namespace) -> None:
    from anabranch.stores.urls import shown_url

    count = ask_application(arguments, lambda application: application.copy_to(arguments.target))
    target = shown_url(arguments.target)
    show(f"{arguments.app}: moved to {target}, with {counted(count, 'lease')}; from now on, workers start only there")

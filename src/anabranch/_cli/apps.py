"""`anabranch apps ls | show | delete`: the applications of this machine or of a given lease store."""

import argparse
import asyncio
import os
from typing import TYPE_CHECKING, Final

import msgspec

from anabranch._cli.fleet_tables import fleet_lines, headline
from anabranch._cli.options import (
    Actions,
    add_application_argument,
    add_json_option,
    add_leases_option,
    lag,
    perform,
    timestamp,
)
from anabranch._cli.output import confirm, counted, make_console, print_json, print_table, say, styled

if TYPE_CHECKING:
    from anabranch.reports import FleetStatus
    from anabranch.stores.catalogue import StoredApplication

_EXAMPLES: Final = """\
examples:
  anabranch apps ls
  anabranch apps show billing
  anabranch apps show billing --leases sqlite:///var/lib/billing.db --json
  anabranch apps delete billing

`anabranch top APP` watches an application live, `anabranch explain APP` says
why a shard is stalled.
"""


class ListedApplicationDocument(msgspec.Struct, frozen=True, kw_only=True):
    """An application as `ls --json` prints it."""

    app: str
    leases: str
    streams: tuple[str, ...]
    live_member_count: int
    unfinished_shard_count: int
    stalled_shard_count: int
    millis_behind_latest: int | None
    records_per_second: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    actions = Actions(parser)
    ls = actions.add("ls", _ls, "list the applications of a lease store, or of this machine")
    add_leases_option(ls, "a lease store", default="all lease files on this machine")
    show = actions.add("show", _show, "show an application's workers and shards", example="billing")
    add_application_argument(show)
    delete = actions.add(
        "delete", _delete, "delete an application: its leases and checkpoints", example="billing --yes"
    )
    add_application_argument(delete)
    delete.add_argument("--yes", action="store_true", help="delete without asking")
    for action in (ls, show):
        add_json_option(action)


def run(arguments: argparse.Namespace) -> int:
    return perform(arguments)


def _ls(arguments: argparse.Namespace) -> int:
    found = asyncio.run(_list(arguments.leases))
    if arguments.json:
        print_json(found)
    elif found:
        rows = [
            (
                application.app,
                ", ".join(application.streams),
                str(application.live_member_count),
                str(application.unfinished_shard_count),
                styled(str(application.stalled_shard_count), "red" if application.stalled_shard_count else ""),
                lag(application.millis_behind_latest),
                application.leases,
            )
            for application in found
        ]
        headings = ("APP", "STREAMS", "WORKERS", "SHARDS", "STALLED", "BEHIND", "LEASES")
        print_table(headings, rows, right=("WORKERS", "SHARDS", "STALLED", "BEHIND"))
    else:
        from anabranch.stores.urls import shown_url

        place = shown_url(arguments.leases) if arguments.leases else "the lease files of this machine"
        say(f"no applications in {place}: Consumer(..., app=NAME) creates one")
    return 0


async def _list(leases: str | None) -> list[ListedApplicationDocument]:
    from anabranch.application import Application
    from anabranch.stores.catalogue import stored_applications

    async def look(stored: "StoredApplication") -> ListedApplicationDocument:
        async with Application(stored.app, leases=stored.leases) as application:
            status = await application.status(watch=True)
        return ListedApplicationDocument(
            app=stored.app,
            leases=stored.leases,
            streams=status.streams,
            live_member_count=len(status.live_members),
            unfinished_shard_count=len(status.unfinished_shards),
            stalled_shard_count=len(status.stalled_shards),
            millis_behind_latest=status.millis_behind_latest,
            records_per_second=status.records_per_second,
        )

    # Together: each waits until its workers have reported.
    return await asyncio.gather(*(look(stored) for stored in await stored_applications(leases, os.environ)))


def _show(arguments: argparse.Namespace) -> int:
    status = asyncio.run(_status(arguments, watch=True))
    if arguments.json:
        print_json(status)
        return 0
    print(f"{status.app}: {headline(status)}")
    print()
    console = make_console()
    for line in fleet_lines(status):
        console.print(line)
    return 0


async def _status(arguments: argparse.Namespace, *, watch: bool = False) -> "FleetStatus":
    from anabranch.application import Application

    async with Application(arguments.app, leases=arguments.leases) as application:
        return await application.status(watch=watch)


def _delete(arguments: argparse.Namespace) -> int:
    status = asyncio.run(_status(arguments))
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
    asyncio.run(_delete_app(arguments))
    print(f"{status.app}: deleted")
    return 0


async def _delete_app(arguments: argparse.Namespace) -> None:
    from anabranch.application import Application

    async with Application(arguments.app, leases=arguments.leases) as application:
        await application.delete()

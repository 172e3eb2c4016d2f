"""`anabranch streams ls | create | describe | delete | consumers`."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from anabranch._cli.connection import connect, wait_until_active, wait_until_deleted
from anabranch._cli.options import (
    Actions,
    add_aws_options,
    add_json_option,
    add_stream_argument,
    argument,
    bounded_integer,
    positive_integer,
    timestamp,
)
from anabranch._cli.output import (
    CommandFailed,
    confirm,
    counted,
    print_facts,
    print_json,
    print_table,
    progress,
    say,
    show,
    styled,
)
from anabranch._model.streams import StreamName, parse_stream
from anabranch.errors import ConfigurationError
from anabranch.limits import MIB, RETENTION_HOURS_MAX, RETENTION_HOURS_MIN

if TYPE_CHECKING:
    from anabranch._wire.messages import ConsumerDescription, StreamSummary

_EXAMPLES: Final = """\
examples:
  anabranch streams ls
  anabranch streams create orders --shards 4
  anabranch streams describe orders --json
  anabranch streams delete orders --yes
  anabranch streams consumers ls orders
  anabranch streams consumers rm orders anabranch-billing-1f2e3d4c

`anabranch streams ACTION --help` lists the options of each action.
"""
_RETENTION: Final = bounded_integer("number of hours", RETENTION_HOURS_MIN, RETENTION_HOURS_MAX)
_STYLES: Final = {"ACTIVE": "green", "CREATING": "yellow", "UPDATING": "yellow", "DELETING": "red"}


def add_streams(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser, _EXAMPLES)
    ls = actions.add("ls", _ls, "list the streams of this account and region")
    create = actions.add("create", _create, "create a stream and wait until it is ACTIVE")
    create.add_argument("stream", type=_stream_name, metavar="NAME", help="name of the new stream")
    create.add_argument("--shards", type=positive_integer, metavar="N", help="provisioned shards (default: on-demand)")
    create.add_argument("--retention", type=_RETENTION, metavar="HOURS", help="24 (the default) to 8760")
    create.add_argument("--no-wait", action="store_true", help="return at once, while it is CREATING")
    describe = actions.add("describe", _describe, "describe a stream")
    add_stream_argument(describe)
    delete = actions.add("delete", _delete, "delete a stream with all its records")
    add_stream_argument(delete)
    delete.add_argument("--with-consumers", action="store_true", help="even if fan-out consumers are registered")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    delete.add_argument("--no-wait", action="store_true", help="return at once, while it is DELETING")
    consumers = actions.add("consumers", _consumers, "list or remove the fan-out consumers of a stream")
    consumers.add_argument("change", choices=("ls", "rm"), metavar="ls|rm", help="list them, or remove some")
    add_stream_argument(consumers)
    consumers.add_argument("names", nargs="*", metavar="NAME", help="with rm: which consumers to remove")
    consumers.add_argument("--yes", action="store_true", help="do not ask")
    for action in (ls, create, describe, consumers):
        add_json_option(action)
    for action in (ls, create, describe, delete, consumers):
        add_aws_options(action)


def _ls(arguments: argparse.Namespace) -> None:
    with connect(arguments) as connection:
        streams = connection.run(connection.control.list_streams())
    found = [
        {
            "name": stream.name,
            "arn": stream.arn,
            "status": stream.status,
            "stream_mode": stream.stream_mode,
            "created": _time(stream.created_seconds),
        }
        for stream in streams
    ]
    shown = {"STREAM": "name", "STATUS": "status", "MODE": "stream_mode", "CREATED": "created"}
    _print_listing(found, shown, arguments, "no streams; create one with `anabranch streams create NAME`")


def _print_listing(
    found: Sequence[dict[str, str | None]], shown: dict[str, str], arguments: argparse.Namespace, nothing: str
) -> None:
    """As JSON, or as a table: `shown` has its fields by heading. Says `nothing` if there is no row."""
    if arguments.json:
        print_json(found)
    elif found:
        rows = [
            [styled(one[name] or "-", _STYLES.get(one[name] or "", "")) for name in shown.values()] for one in found
        ]
        print_table(tuple(shown), rows)
    else:
        say(nothing)


def _create(arguments: argparse.Namespace) -> None:
    stream: StreamName = arguments.stream
    if arguments.no_wait and arguments.retention is not None:
        raise ConfigurationError("--retention needs an ACTIVE stream: omit --no-wait")
    with connect(arguments) as connection:
        connection.run(connection.control.create_stream(stream.name, shard_count=arguments.shards))
        if arguments.no_wait:
            summary = connection.run(connection.summary(stream))
        else:
            with progress(f"creating {stream.name}") as report:
                summary = connection.run(wait_until_active(connection, stream, report))
                if (hours := arguments.retention) is not None and hours > RETENTION_HOURS_MIN:
                    connection.run(connection.control.increase_retention(stream, hours))
                    summary = connection.run(wait_until_active(connection, stream, report))
    if arguments.json:
        print_json(_document(summary, []))
    else:
        show(f"{summary.name}: {summary.status}, {counted(summary.open_shard_count, 'open shard')}, {summary.arn}")


def _describe(arguments: argparse.Namespace) -> None:
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        consumers = connection.run(connection.consumers(summary.arn))
    if arguments.json:
        print_json(_document(summary, consumers))
        return
    print_facts(
        [
            ("stream", summary.name),
            ("ARN", summary.arn),
            ("status", styled(summary.status, _STYLES.get(summary.status, ""))),
            ("mode", summary.stream_mode),
            ("open shards", str(summary.open_shard_count)),
            ("retention", f"{summary.retention_hours} hours"),
            ("largest record", f"{summary.record_bytes_max / MIB:g} MiB"),
            ("distribution", summary.record_distribution or "USER_PARTITION_KEY"),
            ("created", _time(summary.created_seconds) or "-"),
            ("consumers", ", ".join(consumer.name for consumer in consumers) or "none registered for fan-out"),
        ]
    )


def _delete(arguments: argparse.Namespace) -> None:
    stream: StreamName = arguments.stream
    with connect(arguments, stream) as connection:
        summary = connection.run(connection.summary(stream))
        consumers = connection.run(connection.consumers(summary.arn))
        if consumers and not arguments.with_consumers:
            names = ", ".join(consumer.name for consumer in consumers)
            raise ConfigurationError(f"{summary.name} has fan-out consumers ({names}): add --with-consumers")
        confirm(
            f"Delete {summary.arn}, {counted(summary.open_shard_count, 'open shard')} and all records?",
            yes=arguments.yes,
        )
        connection.run(connection.control.delete_stream(stream, with_consumers=arguments.with_consumers))
        if not arguments.no_wait:
            with progress(f"deleting {summary.name}") as report:
                connection.run(wait_until_deleted(connection, stream, report))
    show(f"{summary.name}: {'DELETING' if arguments.no_wait else 'deleted'}")


def _consumers(arguments: argparse.Namespace) -> None:
    names: list[str] = arguments.names
    if arguments.change == "ls" and names:
        raise ConfigurationError("consumers ls lists all of them: leave out the names")
    if arguments.change == "rm" and (arguments.json or not names):
        raise ConfigurationError("consumers rm takes the names of the consumers to remove, and no --json")
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        found = {consumer.name: consumer for consumer in connection.run(connection.consumers(summary.arn))}
        if arguments.change == "ls":
            documents = [
                {"name": one.name, "arn": one.arn, "status": one.status, "created": _time(one.created_seconds)}
                for one in found.values()
            ]
            shown = {"CONSUMER": "name", "STATUS": "status", "CREATED": "created"}
            _print_listing(documents, shown, arguments, f"{summary.name} has no fan-out consumers")
            return
        if unknown := [name for name in names if name not in found]:
            known = ", ".join(found) or "none"
            raise CommandFailed(f"{summary.name} has no consumer {', '.join(unknown)}; it has: {known}")
        confirm(
            f"Applications that use them will poll, or register again. Remove {', '.join(names)} from {summary.name}?",
            yes=arguments.yes,
        )
        for name in names:
            connection.run(connection.client.deregister_stream_consumer(found[name].arn))
            show(f"{name}: removed")


def _document(summary: "StreamSummary", consumers: list["ConsumerDescription"]) -> dict[str, Any]:
    """A stream as `create --json` and `describe --json` print it."""
    fields = msgspec.structs.asdict(summary)
    created, _ = fields.pop("created_seconds"), fields.pop("server_seconds")
    return fields | {"created": _time(created), "consumers": [consumer.name for consumer in consumers]}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else timestamp(seconds, "seconds")


@argument
def _stream_name(text: str) -> StreamName:
    stream = parse_stream(text)
    if stream.arn is not None:
        raise ValueError("pass a name, not an ARN; set the region with --region")
    return stream

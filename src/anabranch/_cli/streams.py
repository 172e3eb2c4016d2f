"""`anabranch streams ls | create | describe | delete | consumers`."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

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
_retention_hours: Final = bounded_integer("number of hours", RETENTION_HOURS_MIN, RETENTION_HOURS_MAX)
_STATUS_STYLES: Final = {"ACTIVE": "green", "CREATING": "yellow", "UPDATING": "yellow", "DELETING": "red"}


def add_streams(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser, _EXAMPLES)
    ls = actions.add("ls", _ls, "list the streams of this account and region")
    create = actions.add("create", _create, "create a stream and wait until it is ACTIVE")
    create.add_argument("stream", type=_stream_name, metavar="NAME", help="name of the new stream")
    create.add_argument("--shards", type=positive_integer, metavar="N", help="provisioned shards (default: on-demand)")
    create.add_argument("--retention", type=_retention_hours, metavar="HOURS", help="24 (the default) to 8760")
    create.add_argument("--no-wait", action="store_true", help="return at once, while it is CREATING")
    describe = actions.add("describe", _describe, "describe a stream")
    add_stream_argument(describe)
    delete = actions.add("delete", _delete, "delete a stream with all its records")
    add_stream_argument(delete)
    delete.add_argument("--with-consumers", action="store_true", help="also remove its registered fan-out consumers")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    delete.add_argument("--no-wait", action="store_true", help="return at once, while it is DELETING")
    consumers = actions.add("consumers", _consumers, "list or remove the fan-out consumers of a stream")
    consumers.add_argument("operation", choices=("ls", "rm"), metavar="ls|rm", help="list them, or remove some")
    add_stream_argument(consumers)
    consumers.add_argument("names", nargs="*", metavar="NAME", help="the consumers to remove (only with rm)")
    consumers.add_argument("--yes", action="store_true", help="do not ask")
    for action in (ls, create, describe, consumers):
        add_json_option(action)
    for action in (ls, create, describe, delete, consumers):
        add_aws_options(action)


def _ls(arguments: argparse.Namespace) -> None:
    with connect(arguments) as connection:
        streams = connection.run(connection.control.list_streams())
    documents = [
        {
            "name": stream.name,
            "arn": stream.arn,
            "status": stream.status,
            "stream_mode": stream.stream_mode,
            "created": _timestamp(stream.created_seconds),
        }
        for stream in streams
    ]
    columns = {"STREAM": "name", "STATUS": "status", "MODE": "stream_mode", "CREATED": "created"}
    _print_listing(documents, columns, arguments, "no streams; create one with `anabranch streams create NAME`")


def _print_listing(
    documents: Sequence[dict[str, str | None]],
    columns: dict[str, str],
    arguments: argparse.Namespace,
    empty_message: str,
) -> None:
    """Prints JSON or a table. `columns` maps each heading of the table to a field of the documents."""
    if arguments.json:
        print_json(documents)
    elif documents:
        rows = [[document[name] or "-" for name in columns.values()] for document in documents]
        print_table(tuple(columns), [[styled(text, _STATUS_STYLES.get(text, "")) for text in row] for row in rows])
    else:
        say(empty_message)


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
                if arguments.retention is not None and arguments.retention > RETENTION_HOURS_MIN:
                    connection.run(connection.control.increase_retention(stream, arguments.retention))
                    summary = connection.run(wait_until_active(connection, stream, report))
    if arguments.json:
        print_json(_stream_document(summary, []))
    else:
        show(f"{summary.name}: {summary.status}, {counted(summary.open_shard_count, 'open shard')}, {summary.arn}")


def _describe(arguments: argparse.Namespace) -> None:
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        consumers = connection.run(connection.consumers(summary.arn))
    if arguments.json:
        print_json(_stream_document(summary, consumers))
        return
    print_facts(
        [
            ("stream", summary.name),
            ("ARN", summary.arn),
            ("status", styled(summary.status, _STATUS_STYLES.get(summary.status, ""))),
            ("mode", summary.stream_mode),
            ("open shards", str(summary.open_shard_count)),
            ("retention", f"{summary.retention_hours} hours"),
            ("largest record", f"{summary.record_bytes_max / MIB:g} MiB"),
            ("distribution", summary.record_distribution or "USER_PARTITION_KEY"),
            ("created", _timestamp(summary.created_seconds) or "-"),
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
    if arguments.operation == "ls" and names:
        raise ConfigurationError("consumers ls lists all consumers: omit the names")
    if arguments.operation == "rm" and (arguments.json or not names):
        raise ConfigurationError("consumers rm needs the names of the consumers to remove, and does not support --json")
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        found = {consumer.name: consumer for consumer in connection.run(connection.consumers(summary.arn))}
        if arguments.operation == "ls":
            documents = [
                {
                    "name": consumer.name,
                    "arn": consumer.arn,
                    "status": consumer.status,
                    "created": _timestamp(consumer.created_seconds),
                }
                for consumer in found.values()
            ]
            columns = {"CONSUMER": "name", "STATUS": "status", "CREATED": "created"}
            _print_listing(documents, columns, arguments, f"{summary.name} has no fan-out consumers")
            return
        if unknown := [name for name in names if name not in found]:
            known = ", ".join(found) or "none"
            raise CommandFailed(f"{summary.name} has no consumer {', '.join(unknown)}; it has: {known}")
        confirm(
            "Applications that use these consumers will register them again, or fall back to polling. "
            f"Remove {', '.join(names)} from {summary.name}?",
            yes=arguments.yes,
        )
        for name in names:
            connection.run(connection.client.deregister_stream_consumer(found[name].arn))
            show(f"{name}: removed")


def _stream_document(summary: "StreamSummary", consumers: list["ConsumerDescription"]) -> dict[str, Any]:
    """What `create --json` and `describe --json` print."""
    return {
        "name": summary.name,
        "arn": summary.arn,
        "status": summary.status,
        "retention_hours": summary.retention_hours,
        "open_shard_count": summary.open_shard_count,
        "stream_mode": summary.stream_mode,
        "record_bytes_max": summary.record_bytes_max,
        "record_distribution": summary.record_distribution,
        "created": _timestamp(summary.created_seconds),
        "consumers": [consumer.name for consumer in consumers],
    }


def _timestamp(seconds: float | None) -> str | None:
    return None if seconds is None else timestamp(seconds, "seconds")


@argument
def _stream_name(text: str) -> StreamName:
    stream = parse_stream(text)
    if stream.arn is not None:
        raise ValueError("pass a name, not an ARN; set the region with --region")
    return stream

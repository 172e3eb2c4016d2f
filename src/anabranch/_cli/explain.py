"""`anabranch explain APP [SHARD]`: in sentences, why a shard does or does not move, and what to do about it."""

import argparse
import asyncio
import textwrap
from typing import TYPE_CHECKING, Final

from anabranch._cli.connection import connect
from anabranch._cli.explanation import Explanation, explain_fleet, explain_shard, explain_unleased
from anabranch._cli.options import add_application_argument, add_aws_options, add_json_option, shard_id_argument
from anabranch._cli.output import DONE, CommandFailed, make_console, print_json
from anabranch._model.shards import Shard
from anabranch._model.streams import parse_stream
from anabranch.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.reports import FleetStatus

__all__ = ["add_arguments", "run"]

_EXAMPLES: Final = """\
examples:
  anabranch explain billing
  anabranch explain billing 3
  anabranch explain billing shardId-000000000003 --json

Without SHARD: the application, and every shard that does not move. It looks
for some seconds, until it has seen the workers' hearts beat.
"""
_COLUMNS_MAX: Final = 100
_INDENT: Final = "  "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_application_argument(parser)
    parser.add_argument("shard", nargs="?", type=shard_id_argument, metavar="SHARD", help="its id, or its number alone")
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    status = asyncio.run(_look(arguments))
    shards = status.still_shards
    if arguments.shard is not None:
        shards = tuple(shard for shard in status.shards if shard.shard_id == arguments.shard)
    explanations = [explain_shard(shard, status) for shard in shards]
    if arguments.shard is not None and not shards:
        explanations = _explain_unleased(arguments, status)
    if arguments.json:
        print_json(explanations)
        return DONE
    if arguments.shard is None:
        _print(explain_fleet(status))
    for number, explanation in enumerate(explanations):
        if number or arguments.shard is None:
            print()
        _print_explanation(explanation)
    return DONE


def _explain_unleased(arguments: argparse.Namespace, status: "FleetStatus") -> list[Explanation]:
    """A shard gets its lease when its parents have been read to the end: until then only the stream knows it."""
    missing = f"application {status.app!r} has no lease for {arguments.shard}"
    reads = f"It reads: {', '.join(shard.shard_id for shard in status.unfinished_shards) or 'none'}"
    streams: dict[str, dict[str, Shard]] = {}
    for stream in status.streams:
        try:
            with connect(arguments) as connection:
                listed = connection.run(connection.shards(parse_stream(stream)))
        except (AnabranchError, CommandFailed) as error:
            raise CommandFailed(
                f"{missing}. {reads}; if it is a child of one of these, its lease is created when that one has been "
                f"read to the end. Stream {stream} could not be listed to find out: {error}"
            ) from error
        streams[stream] = {shard.shard_id: shard for shard in listed}
    holding = {stream: listed for stream, listed in streams.items() if arguments.shard in listed}
    if not holding:
        raise CommandFailed(f"{missing}, and no stream of it has that shard. {reads}")
    explanations = [
        explanation
        for stream, listed in holding.items()
        if (explanation := explain_unleased(listed[arguments.shard], listed, stream, status)) is not None
    ]
    if not explanations:
        raise CommandFailed(
            f"{missing}: workers find new shards when they list the stream, every 30 s by default; a shard that was "
            f"closed before the application started is not read. {reads}"
        )
    return explanations


async def _look(arguments: argparse.Namespace) -> "FleetStatus":
    from anabranch.application import Application

    async with Application(arguments.app, leases=arguments.leases) as application:
        return await application.status(watch=True)


def _print_explanation(explanation: Explanation) -> None:
    first, *others = explanation.situation
    _print([first])
    _print(others, indent=_INDENT)
    if explanation.remedy is not None:
        _print([f"-> {explanation.remedy}"], indent=_INDENT)


def _print(sentences: list[str], *, indent: str = "") -> None:
    console = make_console()
    columns = min(_COLUMNS_MAX, console.width)
    for sentence in sentences:
        print(
            textwrap.fill(
                sentence,
                columns,
                initial_indent=indent,
                subsequent_indent=indent + ("   " if sentence.startswith("->") else ""),
                break_long_words=False,
                break_on_hyphens=False,
            )
            if console.is_terminal
            else f"{indent}{sentence}"
        )

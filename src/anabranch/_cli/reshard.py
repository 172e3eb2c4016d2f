"""`anabranch reshard`: shows what it would do, asks, does it step by step, and waits until the stream has settled."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from anabranch._cli.aws_options import (
    add_aws_options,
    add_json_option,
    add_stream_argument,
    hash_key_argument,
    shard_id_argument,
)
from anabranch._cli.connection import Connection, connect
from anabranch._cli.lineage import range_bar, share
from anabranch._cli.number_arguments import positive_integer
from anabranch._cli.outcomes import CommandFailed
from anabranch._cli.output import confirm, counted, drawing_of, make_console, print_json, print_table, say
from anabranch._cli.progress import progress
from anabranch._cli.reshard_plan import Merge, Scale, Split, Step, plan_merge, plan_scale, plan_split
from anabranch._cli.waiting import wait_until_shards
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.shard_filters import AT_LATEST
from anabranch._model.streams import StreamName
from anabranch.errors import ConfigurationError
from anabranch.limits import UPDATE_SHARD_COUNT_PER_DAY

if TYPE_CHECKING:
    from anabranch._wire.messages import StreamSummary

__all__ = ["add_arguments", "run"]

_EXAMPLES: Final = """\
examples:
  anabranch reshard orders --to 8
  anabranch reshard orders --split shardId-000000000003 --yes
  anabranch reshard orders --split 0 --at 27670116110564327421
  anabranch reshard orders --merge 3 4

Shows the plan and asks before it does anything. A stream stays readable and
writable meanwhile; old shards keep their records until retention ends.
"""
_BAR_CELLS: Final = 32


class ReshardDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints when all is done."""

    stream: str
    steps: tuple[str, ...]
    open_shard_count_before: int
    open_shard_count: int
    open_shard_ids: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_stream_argument(parser)
    change = parser.add_mutually_exclusive_group(required=True)
    change.add_argument("--to", type=positive_integer, metavar="N", help="scale evenly to this many open shards")
    change.add_argument("--split", type=shard_id_argument, metavar="SHARD", help="split this one; its number will do")
    change.add_argument(
        "--merge", type=shard_id_argument, nargs=2, metavar="SHARD", help="merge these two neighbours into one"
    )
    parser.add_argument(
        "--at", type=hash_key_argument, metavar="HASHKEY", help="where --split cuts (default: in the middle)"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    stream: StreamName = arguments.stream
    if arguments.at is not None and arguments.split is None:
        raise ConfigurationError("--at goes with --split")
    with connect(arguments, stream) as connection:
        summary = connection.run(connection.summary(stream))
        _check_changeable(summary)
        steps = _plan(arguments, connection, summary)
        for line in _plan_lines(summary, steps):
            say(line)
        if steps:
            _show_ranges(steps)
            confirm("Go on?", yes=arguments.yes)
        after = summary
        for number, step in enumerate(steps, 1):
            after = _perform(connection, stream, step, after, title=f"step {number} of {len(steps)}")
        shards = connection.run(connection.shards(stream, AT_LATEST))
    if arguments.json:
        print_json(
            ReshardDocument(
                stream=summary.name,
                steps=tuple(str(step) for step in steps),
                open_shard_count_before=summary.open_shard_count,
                open_shard_count=len(shards),
                open_shard_ids=tuple(shard.shard_id for shard in shards),
            )
        )
    else:
        print(f"{after.name}: {after.status}, {counted(len(shards), 'open shard')}")
    return 0


def _check_changeable(summary: "StreamSummary") -> None:
    if summary.stream_mode == "ON_DEMAND":
        raise CommandFailed(
            f"{summary.name} is on demand: AWS splits and merges its shards itself. To do it by hand, make it "
            f"provisioned: aws kinesis update-stream-mode --stream-arn {summary.arn} "
            "--stream-mode-details StreamMode=PROVISIONED"
        )
    if summary.status != "ACTIVE":
        raise CommandFailed(f"{summary.name} is {summary.status}: wait until it is ACTIVE, and try again")


def _plan(arguments: argparse.Namespace, connection: Connection, summary: "StreamSummary") -> Sequence[Step]:
    if arguments.to is not None:
        return plan_scale(summary.open_shard_count, arguments.to)
    shards = connection.run(connection.shards(arguments.stream))
    if arguments.split is not None:
        return [plan_split(shards, arguments.split, arguments.at)]
    return [plan_merge(shards, *arguments.merge)]


def _plan_lines(summary: "StreamSummary", steps: Sequence[Step]) -> list[str]:
    count = counted(summary.open_shard_count, "open shard")
    if not steps:
        return [f"{summary.name} has {count} already: nothing to do"]
    lines = [f"{summary.name} has {count}; the plan:"]
    lines += [f"  {number}. {step}" for number, step in enumerate(steps, 1)]
    scalings = sum(isinstance(step, Scale) for step in steps)
    if scalings > 1:
        lines.append("AWS at most doubles or halves the shards in one call.")
    if scalings:
        lines.append(f"AWS allows {UPDATE_SHARD_COUNT_PER_DAY} such calls in 24 hours; the plan makes {scalings}.")
    return lines


def _show_ranges(steps: Sequence[Step]) -> None:
    """What becomes of the hash ranges. Scaling evenly needs no picture."""
    console = make_console(stderr=True)
    drawing = drawing_of(console)

    def row(name: str, hash_key_range: HashKeyRange) -> tuple[str, str, str]:
        return name, range_bar(hash_key_range, _BAR_CELLS, drawing), share(hash_key_range)

    for step in steps:
        if isinstance(step, Split):
            low, high = step.results
            rows = [row(step.shard.shard_id, step.shard.hash_key_range), row("  becomes", low), row("  and", high)]
        elif isinstance(step, Merge):
            rows = [row(shard.shard_id, shard.hash_key_range) for shard in (step.lower, step.upper)]
            rows.append(row("  become", step.result))
        else:
            continue
        print_table(("", "", ""), rows, console=console)


def _perform(
    connection: Connection, stream: StreamName, step: Step, before: "StreamSummary", *, title: str
) -> "StreamSummary":
    control = connection.control
    count = before.open_shard_count
    match step:
        case Scale():
            connection.run(control.update_shard_count(stream, step.after))
            expected = step.after
        case Split():
            connection.run(control.split_shard(stream, step.shard.shard_id, step.new_starting_hash_key))
            expected = count + 1
        case Merge():
            connection.run(control.merge_shards(stream, step.lower.shard_id, step.upper.shard_id))
            expected = count - 1
    with progress(title) as report:
        return connection.run(wait_until_shards(connection, stream, report, before=count, after=expected))

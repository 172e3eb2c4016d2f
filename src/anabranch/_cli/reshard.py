"""`anabranch reshard`: scales a stream, splits a shard or merges two.

The plan is made first, without I/O. AWS scales a stream at most to double or down to half its open shards in one call,
so a larger change takes several calls. Only open shards can be split, and only neighbours merged. An impossible request
is refused; the error lists what is possible.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from anabranch._cli.connection import Connection, connect
from anabranch._cli.options import (
    add_aws_options,
    add_json_option,
    add_stream_argument,
    hash_key_argument,
    positive_integer,
    shard_id_argument,
)
from anabranch._cli.output import (
    DONE,
    CommandFailed,
    confirm,
    counted,
    drawing_of,
    make_console,
    print_json,
    print_table,
    range_bar,
    say,
    share,
    show,
)
from anabranch._cli.progress import progress, wait_until_resharded
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import AT_LATEST, Shard, StreamName
from anabranch.errors import ConfigurationError
from anabranch.limits import UPDATE_SHARD_COUNT_PER_DAY

if TYPE_CHECKING:
    from anabranch._wire.messages import StreamSummary


_OPEN_SHOWN_MAX: Final = 6


class Scale(msgspec.Struct, frozen=True):
    before: int
    after: int

    def __str__(self) -> str:
        return f"UpdateShardCount {self.before} -> {self.after}"


class Split(msgspec.Struct, frozen=True):
    shard: Shard
    new_starting_hash_key: int

    def __str__(self) -> str:
        return f"SplitShard {self.shard.shard_id} at hash key {self.new_starting_hash_key}"

    @property
    def results(self) -> tuple[HashKeyRange, HashKeyRange]:
        start, end = self.shard.hash_key_range
        return HashKeyRange(start, self.new_starting_hash_key - 1), HashKeyRange(self.new_starting_hash_key, end)


class Merge(msgspec.Struct, frozen=True):
    lower: Shard
    upper: Shard

    def __str__(self) -> str:
        return f"MergeShards {self.lower.shard_id} and {self.upper.shard_id}"

    @property
    def result(self) -> HashKeyRange:
        return HashKeyRange(self.lower.hash_key_range.start, self.upper.hash_key_range.end)


Step = Scale | Split | Merge


def plan_scale(present: int, target: int) -> list[Scale]:
    """The fewest calls that reach the target; empty if already there."""
    steps: list[Scale] = []
    start = present
    while present != target:
        following = min(target, present * 2) if target > present else max(target, -(-present // 2))
        steps.append(Scale(present, following))
        present = following
    if len(steps) > UPDATE_SHARD_COUNT_PER_DAY:
        raise ConfigurationError(
            f"from {start} to {target} shards takes {len(steps)} calls, and AWS allows {UPDATE_SHARD_COUNT_PER_DAY} "
            f"in 24 hours: scale to {steps[UPDATE_SHARD_COUNT_PER_DAY - 1].after} first"
        )
    return steps


def plan_split(shards: Sequence[Shard], shard_id: str, new_starting_hash_key: int | None) -> Split:
    """Defaults to the middle. AWS requires at least two hash keys in each child."""
    shard = _find_open(shards, shard_id)
    start, end = shard.hash_key_range
    middle = start + shard.hash_key_range.size // 2
    key = middle if new_starting_hash_key is None else new_starting_hash_key
    if not start + 1 < key < end:
        raise ConfigurationError(
            f"{shard_id} cannot be split at {key}: give a hash key above {start + 1} and below {end}"
            if end - start > 2
            else f"{shard_id} holds {shard.hash_key_range.size} hash keys, too few to be split"
        )
    return Split(shard, key)


def plan_merge(shards: Sequence[Shard], first_id: str, second_id: str) -> Merge:
    """The shards may be given in any order."""
    if first_id == second_id:
        raise ConfigurationError(f"a merge needs two different shards; {first_id} was passed twice")
    pair = [_find_open(shards, shard_id) for shard_id in (first_id, second_id)]
    lower, upper = sorted(pair, key=lambda shard: shard.hash_key_range)
    if not lower.hash_key_range.is_adjacent_to(upper.hash_key_range):
        asked = pair[0]
        neighbours = [
            shard.shard_id
            for shard in _open_in_order(shards)
            if shard is not asked and shard.hash_key_range.is_adjacent_to(asked.hash_key_range)
        ]
        raise ConfigurationError(
            f"{first_id} and {second_id} are not adjacent: "
            + (f"{first_id} can be merged with {' or '.join(neighbours)}" if neighbours else "it has no open neighbour")
        )
    return Merge(lower, upper)


def _find_open(shards: Sequence[Shard], shard_id: str) -> Shard:
    found = next((shard for shard in shards if shard.shard_id == shard_id), None)
    if found is not None and found.is_open:
        return found
    what = f"there is no {shard_id}" if found is None else f"{shard_id} is closed: it was split or merged before"
    names = [shard.shard_id for shard in _open_in_order(shards)]
    more = f" and {len(names) - _OPEN_SHOWN_MAX} more" if len(names) > _OPEN_SHOWN_MAX else ""
    raise ConfigurationError(f"{what}; the open shards are {', '.join(names[:_OPEN_SHOWN_MAX])}{more}")


def _open_in_order(shards: Sequence[Shard]) -> list[Shard]:
    return sorted((shard for shard in shards if shard.is_open), key=lambda shard: shard.hash_key_range)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_stream_argument(parser)
    change = parser.add_mutually_exclusive_group(required=True)
    change.add_argument("--to", type=positive_integer, metavar="N", help="scale evenly to this many open shards")
    change.add_argument("--split", type=shard_id_argument, metavar="SHARD", help="split this shard (id or number)")
    change.add_argument(
        "--merge", type=shard_id_argument, nargs=2, metavar="SHARD", help="merge these two adjacent shards"
    )
    parser.add_argument(
        "--at", type=hash_key_argument, metavar="HASHKEY", help="hash key where --split cuts (default: the middle)"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    stream: StreamName = arguments.stream
    if arguments.at is not None and arguments.split is None:
        raise ConfigurationError("--at needs --split")
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
            {
                "stream": summary.name,
                "steps": [str(step) for step in steps],
                "open_shard_count_before": summary.open_shard_count,
                "open_shard_count": len(shards),
                "open_shard_ids": [shard.shard_id for shard in shards],
            }
        )
    else:
        show(f"{after.name}: {after.status}, {counted(len(shards), 'open shard')}")
    return DONE


def _check_changeable(summary: "StreamSummary") -> None:
    if summary.stream_mode == "ON_DEMAND":
        raise CommandFailed(
            f"{summary.name} is on-demand: AWS manages its shards. To reshard it yourself, make it "
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
    """Draws the change of hash ranges; uniform scaling needs no drawing."""
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
        return connection.run(wait_until_resharded(connection, stream, report, before=count, after=expected))

"""`anabranch shards`, `which-shard` and `reshard`: show and change the shards of a stream.

`reshard` makes its plan first, without I/O. One call can at most double or halve the number of open shards, so a larger
change takes several calls. Only open shards can be split, and only adjacent ones merged. If a request is impossible,
the error says what is possible.
"""

import argparse
import sys
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from anabranch._cli.connection import Connection, connect, wait_until_resharded
from anabranch._cli.options import (
    add_aws_options,
    add_json_option,
    add_stream_argument,
    hash_key_argument,
    partition_key_argument,
    positive_integer,
    shard_id_argument,
)
from anabranch._cli.output import (
    CommandFailed,
    confirm,
    counted,
    listed,
    make_console,
    print_json,
    print_table,
    progress,
    say,
    show,
    styled,
)
from anabranch._model.hash_keys import HashKeyRange, check_partition_key, md5_hash_key
from anabranch._model.streams import AT_LATEST, Shard, StreamName
from anabranch.errors import ConfigurationError
from anabranch.limits import HASH_KEY_MAX, UPDATE_SHARD_COUNT_PER_DAY

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from anabranch._aws.control import KinesisControl
    from anabranch._wire.messages import StreamSummary

# drawing


_SPACE: Final = HASH_KEY_MAX + 1
_ASCII: Final = str.maketrans("█·├└│─", "#.|`|-")


def _drawn(text: str, console: "Console") -> str:
    """Replaces box-drawing characters if the console's encoding does not have them."""
    return text if console.encoding.lower().startswith("utf") else text.translate(_ASCII)


def range_bar(hash_key_range: HashKeyRange, width: int) -> str:
    """The hash space as `width` cells with this range filled. Bars of adjacent ranges meet; none is empty."""
    start, end = (round(border * width / _SPACE) for border in (hash_key_range.start, hash_key_range.end + 1))
    start = min(start, width - 1)
    end = max(end, start + 1)
    return "·" * start + "█" * (end - start) + "·" * (width - end)


def share(hash_key_range: HashKeyRange) -> str:
    percent = hash_key_range.size * 100 / _SPACE
    return f"{percent:.1f}%" if percent >= 0.1 else "<0.1%"


@dataclass(frozen=True, slots=True)
class LineageRow:
    shard: Shard
    guides: str
    """The tree branches before the name."""
    other_parent: str | None = None
    """For the child of a merge: its other parent, drawn elsewhere."""
    is_repeated: bool = False
    """Already drawn in full under its other parent."""


def lineage(shards: Iterable[Shard]) -> list[LineageRow]:
    """Depth first; siblings in the order of their hash ranges."""
    by_id = {shard.shard_id: shard for shard in sorted(shards, key=_by_hash_range)}
    children: dict[str, list[Shard]] = {}
    for shard in by_id.values():
        for parent in dict.fromkeys(shard.parent_shard_ids):
            children.setdefault(parent, []).append(shard)
    roots = [shard for shard in by_id.values() if not any(parent in by_id for parent in shard.parent_shard_ids)]
    rows: list[LineageRow] = []
    drawn: set[str] = set()
    # (shard, the parent it is drawn under, guides before its own branch, whether it is the last sibling)
    waiting = [(root, "", "", True) for root in reversed(roots)]
    while waiting:
        shard, parent, before, is_last = waiting.pop()
        guides = "" if not parent else before + ("└─" if is_last else "├─")
        others = [other for other in shard.parent_shard_ids if parent and other != parent]
        is_repeated = shard.shard_id in drawn
        rows.append(LineageRow(shard, guides, others[0] if others else None, is_repeated))
        if is_repeated:
            continue
        drawn.add(shard.shard_id)
        below = "" if not parent else before + ("  " if is_last else "│ ")
        siblings = children.get(shard.shard_id, [])
        for position, child in enumerate(reversed(siblings)):
            waiting.append((child, shard.shard_id, below, position == 0))
    return rows


def _by_hash_range(shard: Shard) -> tuple[HashKeyRange, str]:
    return shard.hash_key_range, shard.shard_id


def open_in_order(shards: Iterable[Shard]) -> list[Shard]:
    """By hash key. Some emulators list closed shards too, whatever the filter says."""
    return sorted((shard for shard in shards if shard.is_open), key=_by_hash_range)


# anabranch shards

_SHARDS_EXAMPLES: Final = """\
examples:
  anabranch shards orders
  anabranch shards orders --open --json | jq -r '.[].shard_id'

A child of a merge is drawn under its first parent; the other shows only its
name. AWS does not list parents that are past the stream's retention.
"""
_BAR_CELLS: Final = (12, 48)
_OTHER_COLUMNS: Final = 18  # share, state, and the space between columns


def add_shards(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _SHARDS_EXAMPLES
    parser.set_defaults(work=_show)
    add_stream_argument(parser)
    parser.add_argument("--open", action="store_true", help="only open shards, in the order of their hash ranges")
    add_json_option(parser)
    add_aws_options(parser)


def _show(arguments: argparse.Namespace) -> None:
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        shards = connection.run(connection.shards(arguments.stream))
    open_shards = open_in_order(shards)
    if arguments.json:
        print_json([_document(shard) for shard in (open_shards if arguments.open else shards)])
        return
    show(f"{summary.name}: {summary.status}, {len(open_shards)} open of {counted(len(shards), 'shard')}")
    console = make_console()
    rows = [LineageRow(shard, "") for shard in open_shards] if arguments.open else lineage(shards)
    name_columns = max((len(row.guides) + len(row.shard.shard_id) for row in rows), default=0)
    narrowest, widest = _BAR_CELLS
    cells = max(narrowest, min(widest, console.width - name_columns - _OTHER_COLUMNS))
    headings = ("SHARD", "HASH RANGE", "SHARE", "STATE")
    print_table(headings, [_cells(row, cells, console) for row in rows], right=("SHARE",), console=console)


def _document(shard: Shard) -> dict[str, Any]:
    ending = shard.ending_sequence_number
    return {
        "shard_id": shard.shard_id,
        "is_open": shard.is_open,
        "parent_shard_ids": shard.parent_shard_ids,
        "starting_hash_key": str(shard.hash_key_range.start),
        "ending_hash_key": str(shard.hash_key_range.end),
        "starting_sequence_number": str(shard.starting_sequence_number),
        "ending_sequence_number": None if ending is None else str(ending),
    }


def _cells(row: LineageRow, bar_cells: int, console: "Console") -> tuple["Text | str", ...]:
    shard = row.shard
    name = styled("").append(_drawn(row.guides, console), "dim").append(shard.shard_id, "" if shard.is_open else "dim")
    if row.is_repeated:
        return name, styled(f"above, under {row.other_parent}", "dim"), "", ""
    bar = styled(_drawn(range_bar(shard.hash_key_range, bar_cells), console), "green" if shard.is_open else "dim")
    return name, bar, share(shard.hash_key_range), "open" if shard.is_open else "closed"


# anabranch which-shard

_WHICH_SHARD_EXAMPLES: Final = """\
examples:
  anabranch which-shard orders user-1
  anabranch which-shard orders user-1 user-2 --json
  cut -d, -f1 users.csv | anabranch which-shard orders -
  anabranch which-shard orders --explicit-hash-key 0

Covers the shards that are open now; a split or merge moves keys.
"""


def add_which_shard(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _WHICH_SHARD_EXAMPLES
    parser.set_defaults(work=_find)
    add_stream_argument(parser)
    keys = "partition keys; - reads one from each line of standard input"
    parser.add_argument("keys", nargs="*", type=partition_key_argument, metavar="KEY", help=keys)
    explicit = "an explicit hash key instead of partition keys"
    parser.add_argument("--explicit-hash-key", type=hash_key_argument, metavar="N", help=explicit)
    add_json_option(parser)
    add_aws_options(parser)


def _find(arguments: argparse.Namespace) -> None:
    """Hashes the keys locally: the service only lists the shards."""
    explicit: int | None = arguments.explicit_hash_key
    if (explicit is None) != bool(arguments.keys):
        raise ConfigurationError("pass partition keys or one --explicit-hash-key")
    keys = list(_partition_keys(arguments.keys))
    hashed = [(None, explicit)] if explicit is not None else [(key, md5_hash_key(key)) for key in keys]
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        open_shards = open_in_order(connection.run(connection.shards(arguments.stream, AT_LATEST)))
    found: list[dict[str, str | None]] = []
    for key, hash_key in hashed:
        if (shard := shard_of(open_shards, hash_key)) is None:
            raise CommandFailed(f"no open shard of {summary.name} holds hash key {hash_key}: it is {summary.status}")
        found.append({"partition_key": key, "hash_key": str(hash_key), "shard_id": shard.shard_id})
    if summary.record_distribution == "AUTO":
        say(f"{summary.name} has record distribution AUTO: a key may go to any shard")
    if arguments.json:
        print_json(found)
    else:
        rows = [[one[name] or "-" for name in ("partition_key", "shard_id", "hash_key")] for one in found]
        print_table(("KEY", "SHARD", "HASH KEY"), rows)


def shard_of(open_shards: Sequence[Shard], hash_key: int) -> Shard | None:
    index = bisect_right(open_shards, hash_key, key=lambda shard: shard.hash_key_range.start) - 1
    return open_shards[index] if index >= 0 and hash_key in open_shards[index].hash_key_range else None


def _partition_keys(given: Sequence[str]) -> Iterator[str]:
    for key in given:
        if key != "-":
            yield key
            continue
        if sys.stdin is None:
            raise ConfigurationError("standard input is closed: pass the keys as arguments")
        number = 0
        try:
            for number, line in enumerate(sys.stdin, 1):  # noqa: B007 -- the number is for the error
                yield check_partition_key(line.rstrip("\r\n"))
        except UnicodeDecodeError:
            raise ConfigurationError(f"standard input is not UTF-8 after line {number}") from None
        except ValueError as error:
            raise ConfigurationError(f"line {number} of standard input: {error}") from None


# anabranch reshard


@dataclass(frozen=True, slots=True)
class Step:
    """One call that changes the shards of a stream."""

    text: str
    """The call, as the plan shows it."""
    count_before: int
    count_after: int
    perform: Callable[["KinesisControl", StreamName], Coroutine[Any, Any, None]]
    ranges: Sequence[tuple[str, HashKeyRange]] = ()
    """The hash ranges that change, each with its name in the drawing. Even scaling needs no drawing."""


def plan_scale(start: int, target: int) -> list[Step]:
    """The fewest calls that reach the target; empty if already there."""
    steps: list[Step] = []
    present = start
    while present != target:
        following = min(target, present * 2) if target > present else max(target, -(-present // 2))
        steps.append(_scaling(present, following))
        present = following
    if len(steps) > UPDATE_SHARD_COUNT_PER_DAY:
        raise ConfigurationError(
            f"from {start} to {target} shards takes {len(steps)} calls, and AWS allows {UPDATE_SHARD_COUNT_PER_DAY} "
            f"in 24 hours: scale to {steps[UPDATE_SHARD_COUNT_PER_DAY - 1].count_after} first"
        )
    return steps


def _scaling(before: int, after: int) -> Step:
    text = f"UpdateShardCount {before} -> {after}"
    return Step(text, before, after, lambda control, stream: control.update_shard_count(stream, after))


def plan_split(shards: Sequence[Shard], shard_id: str, new_starting_hash_key: int | None) -> Step:
    """Defaults to the middle. AWS requires at least two hash keys in each child."""
    shard = _find_open(shards, shard_id)
    start, end = shard.hash_key_range
    middle = start + shard.hash_key_range.size // 2
    key = middle if new_starting_hash_key is None else new_starting_hash_key
    if shard.hash_key_range.size < 4:
        raise ConfigurationError(f"{shard_id} holds {shard.hash_key_range.size} hash keys, too few to be split")
    if not start + 1 < key < end:
        bounds = f"give a hash key above {start + 1} and below {end}"
        raise ConfigurationError(f"{shard_id} cannot be split at {key}: {bounds}")
    count = len(open_in_order(shards))
    return Step(
        f"SplitShard {shard_id} at hash key {key}",
        count,
        count + 1,
        lambda control, stream: control.split_shard(stream, shard_id, key),
        [
            (shard_id, shard.hash_key_range),
            ("  becomes", HashKeyRange(start, key - 1)),
            ("  and", HashKeyRange(key, end)),
        ],
    )


def plan_merge(shards: Sequence[Shard], first_id: str, second_id: str) -> Step:
    """The shards may be given in any order."""
    if first_id == second_id:
        raise ConfigurationError(f"a merge needs two different shards; {first_id} was passed twice")
    first, second = _find_open(shards, first_id), _find_open(shards, second_id)
    if not first.hash_key_range.is_adjacent_to(second.hash_key_range):
        neighbours = [
            shard.shard_id
            for shard in open_in_order(shards)
            if shard.hash_key_range.is_adjacent_to(first.hash_key_range)
        ]
        raise ConfigurationError(
            f"{first_id} and {second_id} are not adjacent: "
            + (f"{first_id} can be merged with {' or '.join(neighbours)}" if neighbours else "it has no open neighbour")
        )
    lower, upper = open_in_order([first, second])
    count = len(open_in_order(shards))
    return Step(
        f"MergeShards {lower.shard_id} and {upper.shard_id}",
        count,
        count - 1,
        lambda control, stream: control.merge_shards(stream, lower.shard_id, upper.shard_id),
        [
            (lower.shard_id, lower.hash_key_range),
            (upper.shard_id, upper.hash_key_range),
            ("  become", HashKeyRange(lower.hash_key_range.start, upper.hash_key_range.end)),
        ],
    )


def _find_open(shards: Sequence[Shard], shard_id: str) -> Shard:
    found = next((shard for shard in shards if shard.shard_id == shard_id), None)
    if found is not None and found.is_open:
        return found
    what = f"there is no {shard_id}" if found is None else f"{shard_id} is closed: it was split or merged before"
    names = [shard.shard_id for shard in open_in_order(shards)]
    raise ConfigurationError(f"{what}; the open shards are {listed(names)}")


_RESHARD_EXAMPLES: Final = """\
examples:
  anabranch reshard orders --to 8
  anabranch reshard orders --split shardId-000000000003 --yes
  anabranch reshard orders --split 0 --at 27670116110564327421
  anabranch reshard orders --merge 3 4

Shows the plan and asks before it does anything. A stream stays readable and
writable meanwhile; old shards keep their records until retention ends.
"""
_PLAN_BAR_CELLS: Final = 32


def add_reshard(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _RESHARD_EXAMPLES
    parser.set_defaults(work=_reshard)
    add_stream_argument(parser)
    change = parser.add_mutually_exclusive_group(required=True)
    change.add_argument("--to", type=positive_integer, metavar="N", help="scale evenly to this many open shards")
    change.add_argument("--split", type=shard_id_argument, metavar="SHARD", help="split this shard (id or number)")
    change.add_argument("--merge", type=shard_id_argument, nargs=2, metavar="SHARD", help="merge two adjacent shards")
    middle = "first hash key of the upper child of --split (default: the middle)"
    parser.add_argument("--at", type=hash_key_argument, metavar="HASHKEY", help=middle)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_json_option(parser)
    add_aws_options(parser)


def _reshard(arguments: argparse.Namespace) -> None:
    stream: StreamName = arguments.stream
    if arguments.at is not None and arguments.split is None:
        raise ConfigurationError("--at needs --split")
    with connect(arguments, stream) as connection:
        summary = after = connection.run(connection.summary(stream))
        _check_changeable(summary)
        steps = _plan(arguments, connection, summary)
        _show_plan(summary, steps)
        if steps:
            confirm("Reshard now?", yes=arguments.yes)
        for number, step in enumerate(steps, 1):
            connection.run(step.perform(connection.control, stream))
            with progress(f"step {number} of {len(steps)}") as report:
                after = connection.run(
                    wait_until_resharded(connection, stream, report, before=step.count_before, after=step.count_after)
                )
        shards = connection.run(connection.shards(stream, AT_LATEST))
    if arguments.json:
        print_json(
            {
                "stream": summary.name,
                "steps": [step.text for step in steps],
                "open_shard_count_before": summary.open_shard_count,
                "open_shard_count": len(shards),
                "open_shard_ids": [shard.shard_id for shard in shards],
            }
        )
    else:
        show(f"{after.name}: {after.status}, {counted(len(shards), 'open shard')}")


def _check_changeable(summary: "StreamSummary") -> None:
    if summary.stream_mode == "ON_DEMAND":
        raise CommandFailed(
            f"{summary.name} is on-demand: AWS manages its shards. To reshard it yourself, make it "
            f"provisioned: aws kinesis update-stream-mode --stream-arn {summary.arn} "
            "--stream-mode-details StreamMode=PROVISIONED"
        )
    if summary.status != "ACTIVE":
        raise CommandFailed(f"{summary.name} is {summary.status}: wait until it is ACTIVE, and try again")


def _plan(arguments: argparse.Namespace, connection: Connection, summary: "StreamSummary") -> list[Step]:
    if arguments.to is not None:
        return plan_scale(summary.open_shard_count, arguments.to)
    shards = connection.run(connection.shards(arguments.stream))
    if arguments.split is not None:
        return [plan_split(shards, arguments.split, arguments.at)]
    return [plan_merge(shards, *arguments.merge)]


def _show_plan(summary: "StreamSummary", steps: Sequence[Step]) -> None:
    """On standard error: the steps, and the hash ranges that they change."""
    count = counted(summary.open_shard_count, "open shard")
    if not steps:
        say(f"{summary.name} has {count} already: nothing to do")
        return
    say(f"{summary.name} has {count}; the plan:")
    for number, step in enumerate(steps, 1):
        say(f"  {number}. {step.text}")
    if len(steps) > 1:
        say("AWS at most doubles or halves the shards in one call.")
    ranges = [named for step in steps for named in step.ranges]
    if not ranges:
        say(f"AWS allows {UPDATE_SHARD_COUNT_PER_DAY} such calls in 24 hours; the plan makes {len(steps)}.")
    console = make_console(stderr=True)
    rows = [(name, _drawn(range_bar(keys, _PLAN_BAR_CELLS), console), share(keys)) for name, keys in ranges]
    print_table(("", "", ""), rows, console=console)

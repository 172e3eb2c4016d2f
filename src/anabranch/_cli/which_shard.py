"""`anabranch which-shard`: shows which open shard a partition key maps to. Hashes keys locally."""

import argparse
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

from anabranch._cli.connection import connect
from anabranch._cli.options import (
    add_aws_options,
    add_json_option,
    add_stream_argument,
    hash_key_argument,
    partition_key_argument,
)
from anabranch._cli.output import DONE, CommandFailed, print_json, print_table, say
from anabranch._model.hash_keys import check_partition_key, md5_hash_key
from anabranch._model.streams import AT_LATEST, Shard
from anabranch.errors import ConfigurationError

_EXAMPLES: Final = """\
examples:
  anabranch which-shard orders user-1
  anabranch which-shard orders user-1 user-2 --json
  cut -d, -f1 users.csv | anabranch which-shard orders -
  anabranch which-shard orders --explicit-hash-key 0

Covers the shards that are open now; a split or merge moves keys.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_stream_argument(parser)
    parser.add_argument(
        "keys", nargs="*", type=partition_key_argument, metavar="KEY",
        help="partition keys; - reads one from each line of standard input",
    )  # fmt: skip
    parser.add_argument(
        "--explicit-hash-key",
        type=hash_key_argument,
        metavar="N",
        help="an explicit hash key instead of partition keys",
    )
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    explicit: int | None = arguments.explicit_hash_key
    if (explicit is None) != bool(arguments.keys):
        raise ConfigurationError("pass partition keys or one --explicit-hash-key")
    keys = list(_partition_keys(arguments.keys))
    hashed = [(None, explicit)] if explicit is not None else [(key, md5_hash_key(key)) for key in keys]
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        open_shards = open_in_order(connection.run(connection.shards(arguments.stream, AT_LATEST)))
    found: list[tuple[str | None, str, str]] = []
    for key, hash_key in hashed:
        if (shard := shard_of(open_shards, hash_key)) is None:
            raise CommandFailed(f"no open shard of {summary.name} holds hash key {hash_key}: it is {summary.status}")
        found.append((key, shard.shard_id, str(hash_key)))
    if summary.record_distribution == "AUTO":
        say(f"{summary.name} has record distribution AUTO: a key may go to any shard")
    if arguments.json:
        print_json(
            [{"partition_key": key, "hash_key": hash_key, "shard_id": shard_id} for key, shard_id, hash_key in found]
        )
    else:
        rows = [(key or "-", shard_id, hash_key) for key, shard_id, hash_key in found]
        print_table(("KEY", "SHARD", "HASH KEY"), rows)
    return DONE


def open_in_order(listed: Sequence[Shard]) -> list[Shard]:
    """By hash key. Some emulators list closed shards too, whatever the filter says."""
    return sorted((shard for shard in listed if shard.is_open), key=lambda shard: shard.hash_key_range)


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

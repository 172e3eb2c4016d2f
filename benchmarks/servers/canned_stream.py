"""A whole stream of bytes made beforehand: what a consumer asks for from its start to the tip.

The stream's name says what it holds: `plain-8s-12p-1000x1024` has 8 shards of 12 pages, each of 1000 records of 1 KiB;
`aggregated-8s-12p-100x100x100` has pages of 100 aggregates of 100 records of 100 bytes. After its pages a shard is
empty and stays open. Iterators carry everything, so that nothing is remembered; a page's bytes are made when they are
first asked for, by writing its own sequence numbers into bytes that all pages of a shard share.
"""

import hashlib
import json
import random
import re
from functools import cache, lru_cache

import pybase64

from anabranch._wire.aggregate import AggregateBuilder

PAGE = b"000000000000"  # stands for the page's number in every sequence number, where nothing else looks like it
PAGES_KEPT = 64
"""What the streams of one shape have: making each page on request would slow down the core beside it."""
_NAME = re.compile(rb"(plain|aggregated)-(\d+)s-(\d+)p-(?:(\d+)x)?(\d+)x(\d+)")
_ITERATOR = re.compile(rb"((?:plain|aggregated)-[\dspx-]+)/(\d+)/(\d+)/")
_SHARD = re.compile(rb"shardId-(\d{12})")


def answer(operation: bytes, body: bytes) -> bytes | None:
    """The body of the answer; None for what is no question about such a stream."""
    if operation == b"GetRecords":
        iterator = _ITERATOR.search(body)
        return None if iterator is None else get_records(iterator[1], int(iterator[2]), int(iterator[3]))
    if operation not in {b"DescribeStreamSummary", b"GetShardIterator", b"ListShards"}:
        return None
    name = _NAME.search(body)
    if operation == b"GetShardIterator":
        return b'{"ShardIterator":"%s"}' % _iterator(name[0], int(_SHARD.search(body)[1]), 0)
    shard_count = int(name[2])
    if operation == b"ListShards":
        return json.dumps({"Shards": [shard(number, shard_count) for number in range(shard_count)]}).encode()
    return b"""{"StreamDescriptionSummary":{"StreamName":"%s","StreamStatus":"ACTIVE","OpenShardCount":%d,
        "StreamARN":"arn:aws:kinesis:us-east-1:123456789012:stream/%s","StreamCreationTimestamp":1.7E9,
        "RetentionPeriodHours":24,"EnhancedMonitoring":[]}}""" % (name[0], shard_count, name[0])


def hash_key_range(number: int, shard_count: int) -> tuple[int, int]:
    return (number << 128) // shard_count, ((number + 1) << 128) // shard_count - 1


def shard(number: int, shard_count: int) -> dict:
    first, last = hash_key_range(number, shard_count)
    return {
        "ShardId": f"shardId-{number:012}",
        "HashKeyRange": {"StartingHashKey": str(first), "EndingHashKey": str(last)},
        "SequenceNumberRange": {"StartingSequenceNumber": "4" + "0" * 55},
    }


def get_records(name: bytes, number: int, page: int) -> bytes:
    shape = _NAME.fullmatch(name)
    page_count = int(shape[3])
    if page >= page_count:
        return b'{"MillisBehindLatest":0,"NextShardIterator":"%s","Records":[]}' % _iterator(name, number, page_count)
    kind, shard_count, *counts = shape[1], int(shape[2]), int(shape[4] or 1), int(shape[5]), int(shape[6])
    return b'{"MillisBehindLatest":%d,"NextShardIterator":"%s",%s' % (
        1000 * (page_count - page - 1), _iterator(name, number, page + 1),
        numbered_page(page, kind, number, shard_count, *counts),
    )  # fmt: skip


@lru_cache(PAGES_KEPT)
def numbered_page(page: int, kind: bytes, number: int, *counts: int) -> bytes:
    return one_page(kind, number, *counts).replace(PAGE, b"%012d" % (page + 1))


@cache
def one_page(kind: bytes, number: int, shard_count: int, record_count: int, user_record_count: int, size: int) -> bytes:
    """`record_count` aggregates of `user_record_count`, or that many plain records."""
    if kind == b"plain":
        records = [(key, _text(key, size)) for key in keys(number, shard_count, user_record_count)]
    else:
        records = []
        wanted = iter(keys(number, shard_count, record_count * user_record_count))
        for _ in range(record_count):
            builder = AggregateBuilder()
            for _ in range(user_record_count):
                key = next(wanted)
                assert builder.add(key, _text(key, size), size_max=1 << 24)
            records.append(("a", builder.finish()))
    return b'"Records":[%s]}' % b",".join(
        b'{"SequenceNumber":"4964%s%040d","ApproximateArrivalTimestamp":1.7%dE9,"Data":"%s","PartitionKey":"%s"}'
        % (PAGE, _no_page(n), 11_111_111_111 + n, pybase64.b64encode(data), key.encode())
        for n, (key, data) in enumerate(records)
    )  # fmt: skip


def _no_page(n: int) -> int:
    """Forty digits that grow with n and have no run of twelve zeros."""
    return int("1" * 30 + f"{n + 1_111_111_111:010}")


@cache
def keys(number: int, shard_count: int, count: int) -> list[str]:
    """Partition keys that belong into the shard, all different."""
    first, last = hash_key_range(number, shard_count)
    found, candidate = [], 0
    while len(found) < count:
        key = f"user-{candidate:x}".ljust(16, "-")
        candidate += 1
        if first <= int.from_bytes(hashlib.md5(key.encode()).digest()) <= last:
            found.append(key)
    return found


def _text(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size // 2 + 1).hex().encode()[:size]


def _iterator(name: bytes, number: int, page: int) -> bytes:
    """As long as those of the service."""
    return b"%s/%d/%d/" % (name, number, page) + b"A" * 180

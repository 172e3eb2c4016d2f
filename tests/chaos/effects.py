"""What handlers did, in one file that many processes append to and that outlives kill -9 of any of them.

An entry is one write of 64 bytes to a file opened for appending: the kernel puts it at the end whole, one process after
another, so the order in the file is the order in which it happened. 64 divides a page, so no entry straddles two, and
a process that is killed inside the write leaves a whole entry or none.
"""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from anabranch.records import Record

ENTRY = struct.Struct("<BIQQiI24s11s")
assert ENTRY.size == 64
READ_BYTES = ENTRY.size << 14

Kind = Literal["start", "finish"]
KINDS: tuple[Kind, ...] = ("start", "finish")


class Effect(NamedTuple):
    kind: Kind
    process_id: int
    at_ns: int
    """On the clock that all processes of a machine share."""
    fence_token: int
    record: Record[None]


class EffectsLog:
    """The writing side, one for each process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._process_id = os.getpid()

    def note(self, kind: Kind, record: Record[bytes], fence_token: int) -> None:
        entry = ENTRY.pack(
            KINDS.index(kind),
            self._process_id,
            time.monotonic_ns(),
            fence_token,
            record.sub_sequence_number,
            int(record.shard_id.removeprefix("shardId-")),
            int(record.sequence_number).to_bytes(24, "little"),
            record.partition_key.encode(),
        )
        assert os.write(self._file, entry) == ENTRY.size


class EffectsReader:
    """The reading side: everything that was appended since it last looked."""

    def __init__(self, path: Path, stream: str) -> None:
        path.touch()
        self._file = path.open("rb", buffering=0)
        self._stream = stream

    def close(self) -> None:
        self._file.close()

    def new(self) -> Iterator[Effect]:
        while chunk := self._file.read(READ_BYTES):
            whole = len(chunk) - len(chunk) % ENTRY.size
            for fields in ENTRY.iter_unpack(chunk[:whole]):
                yield self._effect(*fields)
            if whole < len(chunk):
                self._file.seek(whole - len(chunk), os.SEEK_CUR)
                return

    def _effect(self, kind, process_id, at_ns, fence_token, sub_sequence_number, shard, sequence_number, key) -> Effect:
        record = Record(
            stream=self._stream,
            shard_id=f"shardId-{shard:012}",
            sequence_number=str(int.from_bytes(sequence_number, "little")),
            sub_sequence_number=sub_sequence_number,
            partition_key=key.rstrip(b"\0").decode(),
            arrival_seconds=0.0,
            data=b"",
        )
        return Effect(KINDS[kind], process_id, at_ns, fence_token, record)

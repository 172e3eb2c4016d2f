import asyncio
import io
import logging
import os
import random

import pytest

from anabranch.errors import CodecError, ConfigurationError
from anabranch.local import service
from anabranch.local.errors import LocalError
from anabranch.local.journal import Journal
from anabranch.local.service import LocalState

ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
LOW = "shardId-000000000000"


def write(folder, *entries, restore=True):
    async def main():
        journal = Journal(folder)
        journal.rewrite(list(journal.entries()) if restore else [])
        for entry in entries:
            journal.append(entry)
        await journal.durable()
        await journal.close()

    asyncio.run(main())


def read(folder, *, salvage=False):
    async def main():
        journal = Journal(folder, salvage=salvage)
        try:
            return list(journal.entries())
        finally:
            await journal.close()

    return asyncio.run(main())


def test_entries_are_read_in_the_order_they_were_written(tmp_path):
    write(tmp_path, b"one", b"2", b"three" * 1_000)
    write(tmp_path, b"four")
    assert read(tmp_path) == [b"one", b"2", b"three" * 1_000, b"four"]


def test_an_empty_folder_has_no_entries(tmp_path):
    assert read(tmp_path / "new" / "folder") == []


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_an_incomplete_entry_at_the_end_is_dropped_and_logged(tmp_path, cut, caplog):
    write(tmp_path, b"kept", b"torn!")
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == [b"kept"]
    assert "never acknowledged" in caplog.text
    assert (tmp_path / "journal.damaged-1").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: flipped(raw, raw.index(b"third"), raw.index(b"fourth")),
        lambda raw: raw[: raw.index(b"third") + 2] + bytes(len(raw) - raw.index(b"third") - 2),
        lambda raw: flipped(raw[:-1], raw.index(b"third")),
        lambda raw: flipped(raw, raw.index(b"third") - 1, raw.index(b"fourth") - 5),
    ],
    ids=["two entries", "zeros to the end", "before a torn entry", "a checksum and a length"],
)
def test_damage_up_to_the_end_is_not_taken_for_an_interrupted_write(tmp_path, caplog, damage):
    write(tmp_path, b"first", b"second", b"third" * 10, b"fourth" * 10)
    path = tmp_path / "journal"
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == [b"first", b"second"]
    assert "journal.damaged-1" in caplog.text
    assert "never acknowledged" not in caplog.text
    assert (tmp_path / "journal.damaged-1").read_bytes() == damaged


def test_a_damaged_length_of_the_last_entry_keeps_the_file(tmp_path, caplog):
    write(tmp_path, b"first", b"second")
    path = tmp_path / "journal"
    for bit in range(32):
        damaged = flipped(path.read_bytes(), path.read_bytes().index(b"second") - 8 + bit // 8, mask=1 << bit % 8)
        (folder := tmp_path / str(bit)).mkdir()
        (folder / "journal").write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read(folder) == [b"first"]
        assert (folder / "journal.damaged-1").read_bytes() == damaged
        assert bit >= 8 or "never acknowledged" not in caplog.text, "no entry is that long"


def flipped(raw, *places, mask=1):
    damaged = bytearray(raw)
    for place in places:
        damaged[place] ^= mask
    return bytes(damaged)


def test_a_large_torn_entry_is_searched_in_a_moment(tmp_path):
    """The time is that of pytest's limit for a test."""
    entry = random.Random(1).randbytes(12 << 20)
    write(tmp_path, b"kept", entry)
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-1])
    assert read(tmp_path) == [b"kept"]


def test_a_last_entry_with_a_wrong_checksum_is_dropped_and_the_file_is_kept(tmp_path, caplog):
    write(tmp_path, b"kept", b"torn!")
    path = tmp_path / "journal"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == [b"kept"]
    assert "dropped 13 damaged bytes at the end" in caplog.text
    assert "never acknowledged" not in caplog.text
    assert (tmp_path / "journal.damaged-1").read_bytes() == raw
    path.write_bytes(raw[:-13] + b"\xff" * 8)
    assert read(tmp_path) == [b"kept"]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 5_000])
def test_zeros_at_the_end_are_no_entries(tmp_path, count):
    write(tmp_path, b"kept")
    with (tmp_path / "journal").open("ab") as file:
        file.write(bytes(count))
    assert read(tmp_path) == [b"kept"]


def test_zeros_at_the_end_are_not_kept(tmp_path):
    write(tmp_path, b"kept")
    with (tmp_path / "journal").open("ab") as file:
        file.write(bytes(100))
    assert read(tmp_path) == [b"kept"]
    assert not (tmp_path / "journal.damaged-1").exists()


def test_every_flipped_byte_before_the_last_entry_is_an_error_that_keeps_the_file(tmp_path):
    write(tmp_path, b"first", b"\0second\0", b"third")
    path = tmp_path / "journal"
    intact = path.read_bytes()
    begin, last = intact.index(b"first") - 8, intact.index(b"third") - 8
    for place in range(begin, last):
        damaged = bytearray(intact)
        damaged[place] ^= 0x01
        path.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=r"is damaged from byte \d+ to byte \d+.*--salvage"):
            read(tmp_path)
        assert path.read_bytes() == damaged


def test_what_follows_the_damage_can_be_saved_and_the_file_is_kept(tmp_path, caplog):
    write(tmp_path, b"first", b"second", b"third", b"fourth")
    path = tmp_path / "journal"
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"second")] ^= 0x80
    damaged[damaged.index(b"third") - 5] ^= 0x80  # its length
    path.write_bytes(damaged)
    (tmp_path / "journal.damaged-1").write_bytes(b"of an earlier time")
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path, salvage=True) == [b"first", b"fourth"]
    assert (tmp_path / "journal.damaged-2").read_bytes() == damaged
    assert "journal.damaged-2" in caplog.text


@pytest.mark.parametrize("content", [b"", b"something else", b"something else that is longer than the first line"])
def test_a_file_that_is_not_a_journal_is_rejected(tmp_path, content):
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"does not begin as a journal of a local Kinesis.*--salvage"):
        read(tmp_path)
    assert read(tmp_path, salvage=True) == []
    assert (tmp_path / "journal.damaged-1").read_bytes() == content


def test_a_journal_whose_first_line_is_damaged_can_be_saved(tmp_path):
    write(tmp_path, b"first", b"second")
    path = tmp_path / "journal"
    damaged = flipped(path.read_bytes(), 3)
    path.write_bytes(damaged)
    assert read(tmp_path, salvage=True) == [b"first", b"second"]
    assert (tmp_path / "journal.damaged-1").read_bytes() == damaged


def test_two_servers_cannot_share_a_folder(tmp_path):
    async def main():
        first = Journal(tmp_path)
        with pytest.raises(ConfigurationError, match=rf"in use by another local Kinesis \(process {os.getpid()}\)"):
            Journal(tmp_path)
        await first.close()
        await Journal(tmp_path).close()

    asyncio.run(main())


def test_many_changes_share_one_fsync(tmp_path, monkeypatch):
    syncs = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (syncs.append(descriptor), sync(descriptor)))

    async def main():
        journal = Journal(tmp_path)
        journal.rewrite([])
        syncs.clear()

        async def change(number):
            journal.append(b"%d" % number)
            await journal.durable()

        await asyncio.gather(*(change(number) for number in range(100)))
        await journal.close()

    asyncio.run(main())
    assert len(syncs) <= 2
    assert read(tmp_path) == [b"%d" % number for number in range(100)]


def test_a_replacement_drops_earlier_entries_and_keeps_later_ones(tmp_path):
    async def main():
        journal = Journal(tmp_path)
        journal.rewrite([])
        journal.append(b"old")
        await asyncio.sleep(0)
        journal.append(b"old too")
        journal.replace([b"new"])
        journal.append(b"after")
        await journal.durable()
        await journal.close()

    asyncio.run(main())
    assert read(tmp_path) == [b"new", b"after"]


def test_no_change_is_acknowledged_after_a_disk_failure(tmp_path, monkeypatch, caplog):
    def refuse(_):
        raise OSError(28, "No space left on device")

    async def main():
        journal = Journal(tmp_path)
        journal.rewrite([])
        monkeypatch.setattr(os, "fsync", refuse)
        journal.append(b"lost")
        with pytest.raises(LocalError, match="No space left on device"):
            await journal.durable()
        assert journal.failure is not None
        await journal.close()

    asyncio.run(main())


class DiskFile(io.FileIO):
    room = 50

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        written = super().write(data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("entry_bytes", [100, 100_000])
@pytest.mark.parametrize("room_later", [0, 1 << 20], ids=["still full", "room again"])
def test_nothing_follows_an_entry_that_did_not_fit_on_the_disk(tmp_path, entry_bytes, room_later, caplog):
    async def main():
        journal = Journal(tmp_path)
        journal.rewrite([b"kept"])
        journal._file.close()
        disk = DiskFile(journal.path, "ab")
        journal._file = io.BufferedWriter(disk)
        journal.append(b"x" * entry_bytes)
        with pytest.raises(LocalError, match="No space left on device"):
            await journal.durable()
        disk.room = room_later
        journal.append(b"a later change")
        await asyncio.sleep(0)
        await journal.close()

    asyncio.run(main())
    assert b"a later change" not in read(tmp_path)


def everything(state, now_ms):
    def call(operation, **request):
        return state.call(operation, request, now_ms=now_ms)

    seen = [call("DescribeAccountSettings"), call("ListStreams"), call("DescribeLimits")]
    for name in seen[1]["StreamNames"]:
        summary = call("DescribeStreamSummary", StreamName=name)
        arn = summary["StreamDescriptionSummary"]["StreamARN"]
        shards = call("ListShards", StreamName=name)
        seen += [
            summary,
            shards,
            call("ListTagsForStream", StreamName=name),
            call("ListStreamConsumers", StreamARN=arn),
        ]
        for shard in shards["Shards"]:
            iterator = call(
                "GetShardIterator", StreamName=name, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
            )["ShardIterator"]
            answer = call("GetRecords", ShardIterator=iterator)
            seen.append((answer["Records"], answer.get("ChildShards")))
    return seen


def restored(kinesis, entries):
    state = LocalState(kinesis.state.account.settings, entropy=random.Random(2))
    state.restore(entries)
    return state


def make_some_changes(kinesis):
    kinesis.AddTagsToStream(StreamName="orders", Tags={"a": "b"})
    kinesis.RegisterStreamConsumer(StreamARN=ARN, ConsumerName="reader", Tags={"c": "d"})
    kinesis.put("one", "two", hash_key=0)
    kinesis.StartStreamEncryption(StreamName="orders", EncryptionType="KMS", KeyId="k")
    kinesis.put("three", hash_key=0)
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(1 << 126))
    kinesis.put("four", hash_key=0)
    kinesis.wait(hours=1)
    kinesis.UpdateShardCount(StreamName="orders", TargetShardCount=5, ScalingType="UNIFORM_SCALING")
    kinesis.UpdateAccountSettings(MinimumThroughputBillingCommitment={"Status": "ENABLED"})
    kinesis.CreateStream(StreamName="gone")
    kinesis.DeleteStream(StreamName="gone")
    kinesis.CreateStream(StreamName="auto", RecordDistributionStrategy="AUTO", WarmThroughputMiBps=3)
    kinesis.PutRecords(StreamName="auto", Records=[{"Data": bytes([i])} for i in range(9)])


def test_the_journal_and_a_snapshot_both_restore_everything(kinesis):
    make_some_changes(kinesis)
    before = everything(kinesis.state, kinesis.now_ms)
    assert everything(restored(kinesis, kinesis.journal), kinesis.now_ms) == before
    assert everything(restored(kinesis, kinesis.state.snapshot()), kinesis.now_ms) == before


def test_a_snapshot_is_shorter_than_a_long_journal_and_entries_may_be_repeated(kinesis):
    for number in range(600):
        kinesis.put(str(number), hash_key=0)
    snapshot = list(kinesis.state.snapshot())
    assert len(snapshot) == 3  # the commitment, the stream, and its records
    doubled = restored(kinesis, [*snapshot, *snapshot])
    assert everything(doubled, kinesis.now_ms) == everything(kinesis.state, kinesis.now_ms)


def test_sequence_numbers_and_iterators_continue_after_a_restart(kinesis):
    iterator = kinesis.iterator("LATEST")
    number = kinesis.put("before", hash_key=0)[0]["SequenceNumber"]
    kinesis.state = restored(kinesis, kinesis.journal)
    assert int(kinesis.put("after", hash_key=0)[0]["SequenceNumber"]) > int(number)
    assert [record.data for record in kinesis.GetRecords(ShardIterator=iterator)["Records"]] == [b"before", b"after"]


def test_sequence_numbers_are_never_reused_even_if_their_records_were_trimmed(kinesis):
    number = kinesis.put("old", hash_key=0)[0]["SequenceNumber"]
    kinesis.wait(hours=25)
    kinesis.iterator()
    kinesis.state = restored(kinesis, list(kinesis.state.snapshot()))
    assert kinesis.read() == []
    assert int(kinesis.put("new", hash_key=0)[0]["SequenceNumber"]) > int(number)


def test_a_change_that_was_pending_takes_effect_after_the_restart(make_kinesis):
    kinesis = make_kinesis(state_delay_ms=1000)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    kinesis.wait(ms=1000)
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey=str(1 << 127))
    kinesis.state = restored(kinesis, kinesis.journal)
    assert kinesis.state.next_deadline_ms() == kinesis.now_ms + 1000
    assert kinesis.open_shard_ids() == [LOW]
    kinesis.wait(ms=1000)
    assert len(kinesis.open_shard_ids()) == 2


def test_reads_journal_nothing_and_every_write_does(kinesis):
    length = len(kinesis.journal)
    everything(kinesis.state, kinesis.now_ms)
    assert len(kinesis.journal) == length
    kinesis.put("a")
    assert len(kinesis.journal) == length + 1


def test_invalid_journal_entries_are_errors_that_name_the_entry(kinesis):
    with pytest.raises(CodecError, match="journal entry 0 cannot be decoded"):
        restored(kinesis, [b"\xc1"])
    kinesis.journal.clear()
    kinesis.put("a")
    with pytest.raises(CodecError, match="journal entry 0 has records of shardId-000000000001 in stream orders"):
        restored(kinesis, kinesis.journal)
    fresh = LocalState(entropy=random.Random(1))
    fresh.call("CreateStream", {"StreamName": "orders", "ShardCount": 1}, now_ms=kinesis.now_ms)
    with pytest.raises(CodecError, match="an entry is missing"):
        fresh.restore(kinesis.journal)


def test_no_entry_of_a_snapshot_is_too_large(kinesis, monkeypatch):
    monkeypatch.setattr(service, "_SNAPSHOT_BYTES", 1_000)
    for number in range(100):
        kinesis.put(str(number) * 50, hash_key=0)
    snapshot = list(kinesis.state.snapshot())
    assert max(map(len, snapshot[2:])) < 4_000
    assert everything(restored(kinesis, snapshot), kinesis.now_ms) == everything(kinesis.state, kinesis.now_ms)


def test_entries_that_need_a_lost_one_are_counted_when_the_rest_is_saved(kinesis):
    kinesis.put("one", hash_key=0)
    state = LocalState(kinesis.state.account.settings, entropy=random.Random(2))
    commitment, _, *records = kinesis.state.snapshot()
    assert state.restore([commitment, *records, b"garbage"], salvage=True) == len(records) + 1

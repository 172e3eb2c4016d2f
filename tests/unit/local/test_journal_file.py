import asyncio
import logging
import os

import pytest

from anabranch.errors import ConfigurationError
from anabranch.local.errors import LocalError
from anabranch.local.journal import Journal


def write(folder, *entries, restore=True):
    async def main():
        journal = Journal(folder)
        journal.rewrite(list(journal.entries()) if restore else [])
        for entry in entries:
            journal.append(entry)
        await journal.durable()
        await journal.close()

    asyncio.run(main())


def read(folder):
    async def main():
        journal = Journal(folder)
        try:
            return list(journal.entries())
        finally:
            await journal.close()

    return asyncio.run(main())


def test_entries_come_back_in_their_order(tmp_path):
    write(tmp_path, b"one", b"", b"three" * 1_000)
    write(tmp_path, b"four")
    assert read(tmp_path) == [b"one", b"", b"three" * 1_000, b"four"]


def test_an_empty_folder_has_no_entries(tmp_path):
    assert read(tmp_path / "new" / "folder") == []


@pytest.mark.parametrize("cut", [1, 4, 9, 12])
def test_a_torn_tail_is_dropped_and_said(tmp_path, cut, caplog):
    write(tmp_path, b"kept", b"torn!")
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path) == [b"kept"]
    assert "never acknowledged" in caplog.text


def test_a_tail_with_the_wrong_bytes_is_dropped(tmp_path):
    write(tmp_path, b"kept", b"torn!")
    path = tmp_path / "journal"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert read(tmp_path) == [b"kept"]
    path.write_bytes(raw[:-13] + b"\xff" * 8)
    assert read(tmp_path) == [b"kept"]


def test_another_file_is_not_taken_for_a_journal(tmp_path):
    (tmp_path / "journal").write_bytes(b"something else")
    with pytest.raises(ConfigurationError, match="is not a journal of a local Kinesis"):
        read(tmp_path)


def test_two_servers_do_not_share_a_folder(tmp_path):
    async def main():
        first = Journal(tmp_path)
        with pytest.raises(ConfigurationError, match=rf"in use by another local Kinesis \(process {os.getpid()}\)"):
            Journal(tmp_path)
        await first.close()
        await Journal(tmp_path).close()

    asyncio.run(main())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="as data folder"):
        Journal(tmp_path / "file" / "folder")


def test_many_changes_share_one_sync(tmp_path, monkeypatch):
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


def test_a_replacement_forgets_what_was_before_and_keeps_what_follows(tmp_path):
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


def test_a_disk_that_fails_ends_every_acknowledgement(tmp_path, monkeypatch, caplog):
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

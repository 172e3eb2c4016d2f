from pathlib import Path

import pytest

from anabranch.errors import LeaseStoreInvalidError
from anabranch.stores.sqlite import check_place, file_system, has_reliable_locks, is_ephemeral

MOUNTS = r"""/dev/vda / ext4 rw 0 0
tmpfs /run tmpfs rw 0 0
server:/export /mnt/share nfs4 rw 0 0
sshfs /mnt/ssh fuse.sshfs rw 0 0
//nas/x /mnt/with\040blank cifs rw 0 0
/dev/vdb /mnt/share/local ext4 rw 0 0
overlay /over ext4 rw 0 0
overlay /over overlay rw 0 0
broken line
"""


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/var/lib/x.db", "ext4"),
        ("/run/x.db", "tmpfs"),
        ("/running/x.db", "ext4"),
        ("/mnt/share/x.db", "nfs4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/share/local/x.db", "ext4"),
        ("/mnt/ssh/a/b/x.db", "fuse.sshfs"),
        ("/mnt/with blank/x.db", "cifs"),
        ("/over/x.db", "overlay"),
    ],
)
def test_the_longest_and_latest_mount_decides_the_file_system(path, kind):
    assert file_system(Path(path), MOUNTS) == kind


def test_the_mounts_of_this_machine_are_read():
    assert file_system(Path("/proc/self/status")) in {"proc", None}


def test_a_system_that_lists_no_mounts_is_accepted(monkeypatch):
    def refuse(*_args, **_options):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    kind = file_system(Path("/var/lib/x.db"))
    assert kind is None
    assert check_place(Path("/var/lib/x.db"), kind) is None
    assert not has_reliable_locks(kind)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p"])
def test_a_network_file_system_is_refused(kind):
    with pytest.raises(LeaseStoreInvalidError, match=rf"/x\.db is on a network file system \({kind}\)"):
        check_place(Path("/x.db"), kind)
    assert not has_reliable_locks(kind)


@pytest.mark.parametrize("kind", ["fuse", "fuse.sshfs", "virtiofs"])
def test_a_file_system_that_may_be_shared_is_warned_of_and_proves_nothing(kind):
    assert f"is on {kind}" in check_place(Path("/x.db"), kind)
    assert not has_reliable_locks(kind)


def test_a_local_disk_is_good():
    assert check_place(Path("/x.db"), "ext4") is None
    assert has_reliable_locks("ext4")
    assert not is_ephemeral("ext4")
    assert is_ephemeral("overlay")

"""Where a lease file may lie.

SQLite's write-ahead log is shared memory between processes, so the file must be on a disk of this machine: network
file systems are refused (rule L16). On FUSE and its like nobody can tell what locks are worth: allowed with a
warning, and never taken as proof that a process is dead.
"""

import os
import re
from pathlib import Path
from typing import Final

from anabranch.errors import LeaseStoreInvalidError

__all__ = ["NETWORK", "check_place", "file_system", "forgets", "has_true_locks"]

NETWORK: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "smb3", "smbfs",
})  # fmt: skip
_PASSED_THROUGH: Final = frozenset({"drvfs", "fuse", "fuseblk", "prl_fs", "vboxsf", "virtiofs"})
_FORGETFUL: Final = frozenset({"overlay", "ramfs", "tmpfs"})
_OCTAL = re.compile(r"\\([0-7]{3})")  # how /proc/mounts writes blanks in names


def file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system that holds `path`; None where the kernel does not tell (no /proc/mounts)."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
    real = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # the later of two mounts on one place is the one seen
            best, kind = point, fields[2]
    return kind


def has_true_locks(kind: str | None) -> bool:
    return kind is not None and kind not in NETWORK and not _is_passed_through(kind)


def forgets(kind: str | None) -> bool:
    """Whether what is written there goes with the container or the machine's next start."""
    return kind in _FORGETFUL


def check_place(path: Path, kind: str | None) -> str | None:
    """Refuses a network file system; returns a warning for one that may be one."""
    if kind in NETWORK:
        raise LeaseStoreInvalidError(
            f"{path} is on a network file system ({kind}), where SQLite's locks and shared memory do not hold: "
            "name a file on a local disk, or a lease store that is made for several machines"
        )
    if kind is not None and _is_passed_through(kind):
        return (
            f"{path} is on {kind}: if several machines mount it, they will not see each other's locks and records "
            "will be handled twice; keep the lease file on a local disk"
        )
    return None


def _is_passed_through(kind: str) -> bool:
    return kind in _PASSED_THROUGH or kind.startswith("fuse.")

"""What a committed checkpoint says is finished: everything up to its watermark, and above that, up to its frontier,
what is not of an open key or lies before that key's first open record.
"""

import hashlib

from anabranch._model.leases import Checkpoint
from anabranch.testing.checkers.journal import Written

__all__ = ["covers"]


def covers(checkpoint: Checkpoint, record: Written) -> bool:
    position = record.position
    if checkpoint.watermark is None:
        return False
    if position <= checkpoint.watermark:
        return True
    if checkpoint.frontier is None or position > checkpoint.frontier:
        return False
    text = str(position) if checkpoint.order == "none" else record.partition_key
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return all(key.digest != digest or position < key.first_open for key in checkpoint.open_keys)

"""How an operator's command changes a lease row (rule C3). Pure: other modules decide who applies it, and when.

A record that is skipped stays an open entry of the row, marked as `skipping`: the owner finishes it when it reads it,
and does not call the handler.
"""

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._core.tracker import digest_of
from anabranch._model.leases import ControlRow, LeaseRow, OpenKey, Stopped
from anabranch._model.streams import Position

SKIP: Final = "skip"
RESUME: Final = "resume"
SEEN_STOP: Final = "stop"
"""The argument that names the stop that the sender has seen. A resume does not apply to a later one."""


class CommandOutcome(msgspec.Struct, frozen=True):
    state: Literal["applied", "refused"]
    result: str
    row: LeaseRow | None = None
    """What to write; None if there is nothing to write."""


def stop_id(stopped: Stopped) -> str:
    """Identifies this stop. A later one has another id, also at the same record."""
    return f"{stopped.member_id}@{stopped.at_wall_ms}"


def passed(position: Position) -> CommandOutcome:
    """The checkpoint is past this position. Whether a record had it is unknown."""
    return CommandOutcome("applied", f"nothing to skip: the checkpoint is already past {position}")


def apply_to_row(command: ControlRow, row: LeaseRow) -> CommandOutcome:
    """For a lease whose shard is not being handled: it is stopped, or nobody owns it."""
    if row.is_finished:
        return CommandOutcome("refused", "the shard is finished")
    if command.action == RESUME:
        if row.stopped is None:
            return CommandOutcome("applied", "it is not stopped any more")
        if command.arguments.get(SEEN_STOP) != stop_id(row.stopped):
            return CommandOutcome("refused", f"the shard has stopped again since, at record {row.stopped.position}")
        return CommandOutcome("applied", "resumed: its record is tried once more", replace(row, stopped=None))
    if command.action != SKIP:
        return CommandOutcome("refused", f"this version does not know the command {command.action!r}")
    try:
        position = Position.parse(command.arguments.get("position", ""))
    except ValueError:
        return CommandOutcome("refused", f"no position in {command.arguments}")
    return _skip(row, position)


def _skip(row: LeaseRow, position: Position) -> CommandOutcome:
    checkpoint, stopped = row.checkpoint, row.stopped
    if is_finished(row, position):
        return passed(position)
    if any(key.first_open == position and key.state == "skipping" for key in checkpoint.open_keys):
        return CommandOutcome("applied", f"record {position} will be skipped")
    is_open = any(key.first_open == position for key in checkpoint.open_keys)
    if stopped is not None and stopped.position not in {None, position} and not is_open:
        return CommandOutcome("refused", f"the shard is stopped at record {stopped.position}, not at {position}")
    if stopped is None and not is_open:
        return CommandOutcome("refused", f"record {position} is not one that failed")
    key = stopped.partition_key if stopped is not None and stopped.position == position else None
    marked = [
        replace(entry, state="skipping", error_type="", fingerprint="") if entry.first_open == position else entry
        for entry in checkpoint.open_keys
    ]
    if not is_open:
        marked.append(OpenKey(digest_of(key, position, checkpoint.order), position, 0, "skipping"))
    marked.sort(key=lambda entry: entry.digest)
    row = replace(row, stopped=None, checkpoint=replace(checkpoint, open_keys=tuple(marked)))
    return CommandOutcome("applied", f"record {position} will be skipped", row)


def is_finished(row: LeaseRow, position: Position) -> bool:
    """Whether the record is known to be finished."""
    watermark = row.checkpoint.watermark
    return watermark is not None and position <= watermark

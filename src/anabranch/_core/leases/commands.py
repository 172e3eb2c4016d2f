"""How an operator's command changes a lease row (rule C3). Pure: other modules decide which worker applies it and when.

To skip a record, its open entry in the row is marked `skipping`. When the owner reads the record, it finishes it
without a call of the handler.
"""

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from anabranch._core.tracker import digest_of
from anabranch._model.leases import ControlRow, LeaseRow, OpenKey, Stopped
from anabranch._model.streams import Position

# actions
SKIP: Final = "skip"
RESUME: Final = "resume"

STOP_ID_ARGUMENT: Final = "stop"
"""The argument of `resume` that names the stop which the operator saw (`stop_id`)."""


class CommandOutcome(msgspec.Struct, frozen=True):
    state: Literal["applied", "refused"]
    result: str
    """What the operator is told."""
    row: LeaseRow | None = None
    """The row to write; None if there is nothing to write."""


def stop_id(stopped: Stopped) -> str:
    """Differs for each stop, even if a shard stops again at the same record."""
    return f"{stopped.member_id}@{stopped.at_wall_ms}"


def nothing_to_skip(position: Position) -> CommandOutcome:
    """The checkpoint is past this position. Whether there was a record at it is unknown."""
    return CommandOutcome("applied", f"nothing to skip: the checkpoint is already past {position}")


def apply_to_row(command: ControlRow, row: LeaseRow) -> CommandOutcome:
    """For a lease whose shard is not being handled: the shard is stopped, or nobody owns the lease."""
    if row.is_finished:
        return CommandOutcome("refused", "the shard is finished")
    if command.action == RESUME:
        if row.stopped is None:
            return CommandOutcome("applied", "the shard is not stopped any more")
        if command.arguments.get(STOP_ID_ARGUMENT) != stop_id(row.stopped):
            return CommandOutcome("refused", f"the shard has stopped again since, at record {row.stopped.position}")
        return CommandOutcome(
            "applied", "resumed: the record at which it stopped is tried again", replace(row, stopped=None)
        )
    if command.action != SKIP:
        return CommandOutcome("refused", f"this version does not know the command {command.action!r}")
    try:
        position = Position.parse(command.arguments.get("position", ""))
    except ValueError:
        return CommandOutcome("refused", f"the command has no valid position: {command.arguments}")
    return _skip(row, position)


def _skip(row: LeaseRow, position: Position) -> CommandOutcome:
    checkpoint, stopped = row.checkpoint, row.stopped
    if is_finished(row, position):
        return nothing_to_skip(position)
    entries = [entry for entry in checkpoint.open_keys if entry.first_open == position]
    if any(entry.state == "skipping" for entry in entries):
        return CommandOutcome("applied", f"record {position} will be skipped")
    is_open = bool(entries)
    if stopped is not None and stopped.position not in {None, position} and not is_open:
        return CommandOutcome("refused", f"the shard is stopped at record {stopped.position}, not at {position}")
    if stopped is None and not is_open:
        return CommandOutcome("refused", f"record {position} has not failed")
    partition_key = stopped.partition_key if stopped is not None and stopped.position == position else None
    marked = [
        replace(entry, state="skipping", error_type="", fingerprint="") if entry.first_open == position else entry
        for entry in checkpoint.open_keys
    ]
    if not is_open:
        marked.append(OpenKey(digest_of(partition_key, position, checkpoint.order), position, 0, "skipping"))
    marked.sort(key=lambda entry: entry.digest)
    row = replace(row, stopped=None, checkpoint=replace(checkpoint, open_keys=tuple(marked)))
    return CommandOutcome("applied", f"record {position} will be skipped", row)


def is_finished(row: LeaseRow, position: Position) -> bool:
    """Whether the record is known to be finished."""
    watermark = row.checkpoint.watermark
    return watermark is not None and position <= watermark

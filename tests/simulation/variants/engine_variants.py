"""Mistakes planted in the real engine, each as a patch, and the promise whose checker must notice."""

from typing import NamedTuple

from msgspec.structs import replace

from anabranch._core.checkpoints.tracker import Tracker
from anabranch._core.leases.book import Book
from anabranch._engine.lease_loop import LeaseLoop
from anabranch._engine.member import Member
from anabranch._engine.session import Session
from anabranch._model.start_positions import StartingPosition
from anabranch.testing.world import FleetOptions

BUSY = FleetOptions(worker_count=3, shard_count=2, record_count=250, faulty_seconds=60.0, handler_seconds_max=0.2)
ROUGH = replace(BUSY, pauses_each=10.0, crashes_each=30.0)


class Mistake(NamedTuple):
    patches: list[tuple[type, str, object]]
    promise: str
    options: FleetOptions

    def plant(self, monkeypatch):
        for owner, name, replacement in self.patches:
            monkeypatch.setattr(owner, name, replacement)


def _commit_what_was_read(original):
    def checkpoint(self, *arguments, **options):
        made = original(self, *arguments, **options)
        return made if made.frontier is None else replace(made, watermark=made.frontier, open_keys=())

    return checkpoint


def _from_the_tip(self):
    return StartingPosition("LATEST") if self.read_after is not None else self.row.start


async def _no_floor(self, step):
    return 0


MISTAKES = {
    "the fence is not looked at": Mistake([(Member, "may_start", lambda self: True)], "one owner", ROUGH),
    "children do not wait": Mistake(
        [(Book, "waits", lambda self, row: False), (LeaseLoop, "_floor", _no_floor)],
        "parents first",
        replace(BUSY, reshards_each=5.0, worker_count=4),
    ),
    "the checkpoint follows what was handed out": Mistake(
        [(Tracker, "checkpoint", _commit_what_was_read(Tracker.checkpoint))], "no loss", replace(BUSY, order="key")
    ),
    "an expired iterator goes on at the tip": Mistake(
        [(Session, "starting_position", _from_the_tip)], "no standstill", replace(BUSY, expired=0.1)
    ),
    "a child's token starts at one": Mistake(
        [(LeaseLoop, "_floor", _no_floor)], "one owner", replace(ROUGH, reshards_each=8.0)
    ),
}

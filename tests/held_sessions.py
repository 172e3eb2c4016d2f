"""Sessions of held shards for tests, without a worker."""

from anabranch._core.handling.batches import BatchLimits
from anabranch._core.handling.lanes import RecordsOneByOne
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.service_time import ServiceClock, TrimHorizon
from anabranch._core.reading.window import Unpacker
from anabranch._core.session import ReadPage, Session
from anabranch._model.leases import LeaseKey, LeaseRow
from anabranch._model.streams import StreamName
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.reasons import StoppedByCrashes
from shard_records import STREAM


def make_session(number=0, *, order="shard", until_seconds=None, limits=(), **row):
    shard_id = f"shardId-{number:012}"
    holding = Holding(LeaseRow(key=LeaseKey("1:orders:1", 0, shard_id), **row))
    mode = BatchLimits() if order == "batch" else RecordsOneByOne(order, **dict(limits))
    unpacker = Unpacker(STREAM, shard_id, None, until_seconds=until_seconds)
    return Session(holding, StreamName(STREAM), unpacker, mode, Budget(), TrimHorizon(24, 0.0), ServiceClock())


def add_page(session, page):
    assert session.budget.try_reserve(READ_RESERVE_BYTES)
    session.add_page(page, READ_RESERVE_BYTES)


def read(session, *records, behind_ms=None, is_end=False):
    add_page(session, ReadPage(list(records), 0.0, behind_ms, is_end))


def handle_all(session):
    while (work := session.next_work(0)) is not None:
        session.finish(work)


def stop(session):
    session.stop(StoppedByCrashes(owner_count=5))
    assert session.begin_stop()
    session.confirm_stop()

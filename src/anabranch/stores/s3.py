"""The lease store for one worker that keeps its positions in an S3 object (rule R3): cheap, and nothing to create.

A worker that has joined keeps its rows in memory. One object, `<prefix>/<app>/latest.json`, is saved every minute and
at the stop, on condition that it is still the version that this worker wrote last. A worker that starts takes over by
writing the object: the worker before it sees that at its next save, and ends. If S3 confirms nothing for a while,
heartbeats fail, so that no more handler calls start.

A handle that has not joined (of a worker that starts, or a tool) reads the object for each call, and writes it for each
change.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote, unquote

import msgspec
from msgspec.structs import replace

from anabranch._aws.account import AwsAccount
from anabranch._aws.s3_objects import S3Objects
from anabranch._model.leases import (
    AppRow,
    ControlRow,
    HeartbeatAnswer,
    HeartbeatWrite,
    LeaseRow,
    MemberRow,
    Poll,
    StreamRow,
)
from anabranch.config import Aws
from anabranch.errors import (
    AnabranchError,
    CodecError,
    InvalidRequestError,
    LeaseError,
    LeaseStoreError,
    LeaseStoreInvalidError,
    ServiceError,
    ThrottledError,
    UsageError,
)
from anabranch.stores.dynamodb import access_error
from anabranch.stores.memory import MemoryRows
from anabranch.stores.row_codec import decode_row, encode_row, timestamp
from anabranch.stores.row_store import Changed, Found, Kind, Row, RowKey, RowLeaseStore, Scope, Update, key_of

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SAVED_EVERY_SECONDS: Final = 60.0
_CLOSE_SECONDS_MAX: Final = 5.0
_CONFIRMED_SECONDS_MAX: Final = 75.0
"""Heartbeats fail when S3 has confirmed nothing for this long: a save is due after 60 s, and is tried again for 15."""
_EPOCHS_PER_START: Final = 1_000
"""A worker that starts raises all epochs by this: the previous one may have taken leases since its last save."""
_SAVED_ON_CHANGE: Final = frozenset({"app", "stream", "lease", "command"})
_REFUSED_MAX: Final = 10
_NOT_SAVED: Final = "what was handled since the last save will be handled again"
_OBJECT: Final = "latest.json"
_PROBE: Final = "probe"
_PROBE_WRITES: Final = (None, None, '"0123456789abcdef0123456789abcdef"')
"""The ETag that each probe write expects; None: no object. The first write may create the object. The second then
expects none and the third another one, so both must be refused.
"""


class _Document(msgspec.Struct, kw_only=True):
    """The object. `shards` is for people and other programs; the rows are what is read back."""

    nonce: str
    """`<handle>-<number of the write>`, so that a worker recognises its own writes."""
    saved_at: str
    saved_by: str
    shards: dict[str, dict[str, Any]] = {}
    rows: dict[str, list[msgspec.Raw]] = {}


class S3LeaseStore(RowLeaseStore):
    checkpoint_interval = _SAVED_EVERY_SECONDS
    publish_interval = _SAVED_EVERY_SECONDS

    def __init__(
        self,
        bucket: str,
        prefix: str,
        app: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        aws: Aws | None = None,
    ) -> None:
        super().__init__(app)
        self._url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._above = f"{prefix}/" if prefix else ""
        self._folder = f"{self._above}{quote(app, safe=' @+')}/"
        self._account = AwsAccount(aws)
        self._objects = S3Objects(self._account, bucket, region=region, endpoint_url=endpoint_url)
        self._rows = MemoryRows()
        self._etag: str | None = None
        """Of the object from which the rows were read, or to which they were saved; None if there is none."""
        self._handle = secrets.token_hex(16)
        self._written = self._sent = 0
        """The numbers of our last write that S3 has confirmed, and of the last one that we sent."""
        self._turn = asyncio.Lock()
        self._probes_answered = 0
        self._joined: str | None = None
        """The worker id; None for a handle that has not joined."""
        self._has_unsaved = False
        self._is_unsure = False
        """The answer to a write was lost: it may have taken effect, or still may."""
        self._has_new_leases = False
        """This handle has not joined, and has created leases. They are saved together with the next change."""
        self._refused_count = 0
        self._saved_at = self._confirmed_at = 0.0
        """When the last save began, and when S3 last confirmed that the object is ours."""
        self._end_error: LeaseStoreInvalidError | None = None
        """Why this worker has ended: another writer has replaced its object."""

    def __str__(self) -> str:
        return self._url

    async def close(self) -> None:
        """Saves the progress of a worker that did not leave, and leases that were created before a worker joined."""
        has_rest = self._has_new_leases if self._joined is None else self._has_unsaved
        if has_rest and self._end_error is None:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS_MAX):
                    await self._save()
            except LeaseError as error:
                _log.warning("%s: %s", _NOT_SAVED, error)
            except TimeoutError:
                _log.warning("%s: %s gave no answer within %.0f s", _NOT_SAVED, self, _CLOSE_SECONDS_MAX)
        self._objects.close()
        self._account.close()

    # the primitives

    async def identity(self) -> str:
        return self._url  # rows in memory cannot go back; a start continues with the object that it finds

    async def get(self, keys: Sequence[RowKey]) -> Found:
        await self._read_again()
        return Found(self._rows.get(keys), None)

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        await self._read_again()
        return Found(self._rows.scan(scopes), None)

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        if self._joined is not None:
            return self._change_in_memory(keys, update)
        async with self._turn:
            while True:
                await self._load()
                changed = self._change_in_memory(keys, update)
                if not self._has_unsaved or await self._write():
                    return changed

    def _change_in_memory(self, keys: Sequence[RowKey], update: Update) -> Changed:
        before, after = self._rows.change(keys, update)
        for key, old, new in zip(keys, before, after, strict=True):
            if old is not new and (key.kind in _SAVED_ON_CHANGE or self._joined is None):
                self._has_unsaved = True
        return Changed(before, after, None)

    # what differs from other stores

    async def create_lease(self, row: LeaseRow) -> LeaseRow:
        """The leases of a stream that begins, or of a copy, are saved together, with the next change of another row.
        Until then nobody reads the stream or starts in the copy.
        """
        if self._joined is not None:
            return await super().create_lease(row)
        async with self._turn:
            await self._load()
            self._has_new_leases = self._has_unsaved = True
            changed = self._rows.change(
                [self._lease_key(row.key)], lambda stored: [row if stored[0] is None else stored[0]]
            )
            return cast("LeaseRow", changed[1][0])

    async def register_member(self, row: MemberRow) -> MemberRow:
        """A worker joins by taking the object over."""
        if self._joined is not None:
            return await super().register_member(row)
        async with self._turn:
            while True:
                await self._load()
                self._take_over(row)
                began = _now()
                if await self._write(by=row.worker_id):
                    self._joined, self._end_error = row.worker_id, None
                    self._saved_at = self._confirmed_at = began
                    return row

    def _take_over(self, row: MemberRow) -> None:
        """Seals the previous worker, so that its leases can be taken. It has ended, or ends at its next save."""
        app_id = self._opened
        killed = set()
        for member in self._rows.scan([Scope("member", self.app, app_id)]):
            if isinstance(member, MemberRow) and member.state == "live":
                killed.add(member.member_id)
                self._put(replace(member, state="sealed"))
        for lease in self._rows.scan([Scope("lease", self.app, app_id, with_finished=False)]):
            if isinstance(lease, LeaseRow):
                # A worker that was killed may have taken this lease after its last save: that counts (rule D5).
                takes = lease.takes_without_progress + bool(killed and lease.owner not in killed)
                epoch = lease.epoch + _EPOCHS_PER_START
                self._put(replace(lease, epoch=epoch, takes_without_progress=takes))
        self._put(row)

    def _put(self, row: Row) -> None:
        self._rows.change([self._key_of(row)], lambda _: [row])

    async def put_control(self, row: ControlRow) -> None:
        """A running worker would not see it, and would end because somebody else wrote the object."""
        if self._joined is None and any(one.state == "live" for one in (await self.poll()).members):
            raise UsageError(f"a worker on {self} cannot be sent commands while it runs: stop it first")
        await super().put_control(row)

    async def heartbeat(self, write: HeartbeatWrite) -> HeartbeatAnswer:
        """On the heartbeat thread: it never calls S3."""
        if self._joined is not None and (silent := _now() - self._confirmed_at) > _CONFIRMED_SECONDS_MAX:
            raise LeaseStoreError(f"{self} has confirmed no save for {silent:.0f} s")
        return await super().heartbeat(write)

    async def poll(self) -> Poll:
        """Saves if that is due."""
        if self._joined is not None:
            if self._end_error is not None:
                raise self._end_error
            since = self._saved_at if self._has_unsaved else self._confirmed_at
            if _now() - since >= _SAVED_EVERY_SECONDS:
                await self._save()
        return await super().poll()

    async def renew_watch(self) -> None:
        """A viewer writes nothing: it would end the worker. It sees what was saved last."""
        if self._joined is not None:
            await super().renew_watch()

    async def leave(self, member_id: str) -> MemberRow | None:
        """The last save."""
        row = await super().leave(member_id)
        if self._joined is not None and self._end_error is None:
            self._has_unsaved = True
            await self._save()
            members = self._rows.scan([Scope("member", self.app, self._opened)])
            if not any(isinstance(one, MemberRow) and one.state == "live" for one in members):
                self._joined = None
        return row

    async def delete_app(self, app_id: str) -> bool:
        async with self._turn:
            while True:
                if self._joined is None:
                    await self._load()
                row = self._rows.get([self._app_key])[0]
                if not isinstance(row, AppRow) or row.app_id != app_id:
                    return False
                self._rows.places.clear()
                if await self._write():
                    break
            self._joined = None
            with contextlib.suppress(AnabranchError):  # an object without rows does no harm
                await self._objects.delete(self._folder + _OBJECT)
                await self._objects.delete(self._folder + _PROBE)
            return True

    async def applications(self) -> list[str]:
        names = await self._answer(self._objects.folders(self._above))
        found = [name for name in names if await self._stored_etag(f"{self._above}{name}/") is not None]
        return sorted(unquote(name) for name in found)

    async def check_conditions(self) -> None:
        """Raises if the server ignores the conditions of writes. Uses an object of its own, because such a server would
        overwrite it. If a check is cancelled, the next one continues it, so that it also ends on a slow link.
        """
        for replaces in _PROBE_WRITES[self._probes_answered :]:
            etag = await self._answer(self._objects.put(self._folder + _PROBE, b"{}", replaces=replaces))
            if etag is not None and self._probes_answered > 0:
                raise LeaseStoreInvalidError(
                    f"the server of {self} ignores If-Match and If-None-Match, so two workers could not notice "
                    "each other",
                    code="conditions_ignored",
                    advice="use S3 itself, or another lease store",
                )
            self._probes_answered += 1

    # the object

    async def _read_again(self) -> None:
        if self._joined is None:
            async with self._turn:
                await self._load()

    async def _load(self) -> None:
        """The rows as they are stored now. While new leases wait for their save, the rows are kept."""
        if self._has_new_leases and not self._is_unsure:
            return
        stored = await self._answer(self._objects.get(self._folder + _OBJECT))
        document, places = (None, {}) if stored is None else self._decode(stored.body)
        before, self._etag = self._etag, None if stored is None else stored.etag
        self._is_unsure = False
        if self._has_new_leases:
            if self._etag == before or (document is not None and self._own_number(document) is not None):
                return  # nobody else has written: the object is as before, or has our write whose answer was lost
            self._has_new_leases = False
            self._rows.places = places
            raise LeaseStoreError(f"somebody else has just changed application {self.app!r} in {self}")
        self._rows.places, self._has_unsaved = places, False

    def _own_number(self, document: _Document) -> int | None:
        """The number of the write, if it is this handle's last confirmed one or one sent since; None if it is not."""
        handle, _, number = document.nonce.rpartition("-")
        is_own = handle == self._handle and number.isdecimal() and self._written <= int(number) <= self._sent
        return int(number) if is_own else None

    async def _write(self, by: str | None = None) -> bool:
        """One PUT, which replaces the object that was read or written last. False if another object is there."""
        await self.check_conditions()
        self._sent += 1
        body = self._encode(by or self._joined or "")
        self._has_unsaved = False
        try:
            etag = await self._answer(self._objects.put(self._folder + _OBJECT, body, replaces=self._etag))
        except BaseException:
            self._has_unsaved = self._is_unsure = True
            raise
        if etag is None:
            self._has_unsaved = self._is_unsure = True
            self._refused_count += 1
            if self._refused_count > _REFUSED_MAX:
                self._refused_count = 0
                raise LeaseStoreError(f"{self} refused {_REFUSED_MAX} writes in a row: others write at the same time")
            return False
        self._refused_count = 0
        self._etag, self._written, self._is_unsure, self._has_new_leases = etag, self._sent, False, False
        return True

    async def _save(self) -> None:
        """Saves the rows. If all are saved, checks that the object is still ours. Raises if this worker has ended:
        another one, or a person, has written the object.
        """
        async with self._turn:
            while True:
                began = _now()
                if self._is_unsure or (not self._has_unsaved and await self._stored_etag(self._folder) != self._etag):
                    await self._read_back()
                if self._end_error is not None or not self._rows.places:
                    return
                if not self._has_unsaved:
                    self._confirmed_at = began
                    return
                if await self._write():
                    self._saved_at = self._confirmed_at = began
                    return

    async def _stored_etag(self, folder: str) -> str | None:
        return await self._answer(self._objects.etag(folder + _OBJECT))

    async def _read_back(self) -> None:
        """Finds out whose object is there: ours, from a write whose answer was lost, or that of another writer."""
        stored = await self._answer(self._objects.get(self._folder + _OBJECT))
        if stored is None:
            self._rows.places = {}  # as every reader sees: the application is gone
            return
        document, _ = self._decode(stored.body)
        if (number := self._own_number(document)) is not None:
            self._etag, self._written, self._is_unsure = stored.etag, number, False
            return
        by = f"worker {document.saved_by!r}" if document.saved_by else "somebody else"
        self._end_error = LeaseStoreInvalidError(
            f"{by} has written the positions of application {self.app!r} in {self} (at {document.saved_at})",
            code="taken_over",
            advice="an application on S3 has one worker; to share it among several, use leases='dynamodb://'",
        )
        raise self._end_error

    def _encode(self, by: str) -> bytes:
        places = [place for place, rows in self._rows.places.items() if rows]
        rows = {
            f"{kind} {app_id}".rstrip(): [
                msgspec.Raw(encode_row(row)) for row in self._rows.scan([Scope(cast("Kind", kind), app, app_id)])
            ]
            for kind, app, app_id in sorted(places)
        }
        document = _Document(
            nonce=f"{self._handle}-{self._sent}",
            saved_at=timestamp(time.time_ns() // 1_000_000),
            saved_by=by,
            shards=self._summary(),
            rows=rows,
        )
        return msgspec.json.format(msgspec.json.encode(document), indent=1)

    def _summary(self) -> dict[str, dict[str, Any]]:
        if self._app_id is None:
            return {}
        found = self._rows.scan([Scope(kind, self.app, self._app_id) for kind in ("stream", "lease")])
        names = {row.stream_key: row.name for row in found if isinstance(row, StreamRow)}
        summary: dict[str, dict[str, Any]] = {}
        for row in found:
            if isinstance(row, LeaseRow):
                at, watermark = row.checkpointed_at_wall_ms, row.checkpoint.watermark
                summary[f"{names.get(row.key.stream_key, row.key.stream_key)}/{row.key.shard_id}"] = {
                    "sequence_number": None if watermark is None else str(watermark.sequence_number),
                    "timestamp": None if at is None else timestamp(at),
                    "finished": row.is_finished,
                }
        return summary

    def _decode(self, body: bytes) -> tuple[_Document, dict[tuple[str, str, str], dict[RowKey, Row]]]:
        try:
            document = msgspec.json.decode(body, type=_Document)
            places: dict[tuple[str, str, str], dict[RowKey, Row]] = {}
            for name, all_data in document.rows.items():
                kind, _, app_id = name.partition(" ")
                rows = [decode_row(cast("Kind", kind), bytes(data)) for data in all_data]
                places[kind, self.app, app_id] = {key_of(row, self.app, app_id): row for row in rows}
        except (msgspec.MsgspecError, ValueError) as error:
            raise LeaseStoreInvalidError(
                f"{self._url}: {self._folder}{_OBJECT} cannot be read ({error})",
                advice="restore an earlier version of the object, or delete it to start over",
            ) from error
        return document, places

    async def _answer(self, call: Awaitable[T]) -> T:
        """The answer of S3. Errors of AWS become those of a lease store."""
        try:
            return await call
        except (LeaseError, UsageError):
            raise
        except AnabranchError as error:
            raise _store_error(self._url, self._bucket, error) from error


def _now() -> float:
    """Includes the time that the machine sleeps, if the system has such a clock (rule L9)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _store_error(store: str, bucket: str, error: AnabranchError) -> LeaseError:
    if isinstance(error, ThrottledError):
        return LeaseStoreError(f"{store} is throttled ({error})", code="throttled")
    policy = "allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"
    if (refused := access_error(store, error, policy)) is not None:
        return refused
    if isinstance(error, ServiceError) and error.code == "NoSuchBucket":
        return LeaseStoreInvalidError(
            f"there is no bucket {bucket!r}", code="bucket_missing", advice="create it, or check its name and region"
        )
    if isinstance(error, InvalidRequestError) and error.code == "ParamValidation":
        return LeaseStoreInvalidError(
            f"{store}: botocore does not know conditional writes ({error})", advice="pip install -U botocore"
        )
    if isinstance(error, InvalidRequestError | CodecError):
        return LeaseStoreInvalidError(f"{store} rejected a request ({error})")
    return LeaseStoreError(f"{store} gave no answer ({error})")

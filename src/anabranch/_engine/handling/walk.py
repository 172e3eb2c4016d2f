"""Iterating over a stream: one record after another, or batch after batch, by the caller's own loop.

What was handed out is acknowledged when the next is asked for. So leaving the loop by `break` or an exception repeats
the record in hand, and `stop()` inside the loop ends it after acknowledging that record. A stretch whose lease is lost
is dropped: its rest belongs to somebody else.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from anabranch._engine.handling.batch_feed import BatchFeed
from anabranch._engine.handling.failures import OnUndecodable
from anabranch._engine.handling.handling import Handling, UndecodableError
from anabranch._engine.session import Session
from anabranch.records import Batch, Record

__all__ = ["SLICE", "Walk"]

SLICE = 500
"""Records after which the event loop turns, also for a caller whose own loop never waits."""


class Walk:
    def __init__(
        self,
        feed: BatchFeed,
        handling: Handling,
        *,
        on_undecodable: OnUndecodable,
    ) -> None:
        self._feed = feed
        self._handling = handling
        self._on_undecodable = on_undecodable
        self._undecodable: UndecodableError | None = None
        """Of the record after the batch in hand: the shard stops there when the batch is acknowledged."""
        self._session: Session | None = None
        self._stretch: list[Record[bytes]] = []
        self._handed_out = 0
        self._acknowledged = 0
        self.task: asyncio.Task[Any] | None = None
        """The caller's, once it is known."""
        self._since_turn = 0
        self.wants_turn = False
        """The event loop should turn before the next is asked for."""
        self.next_record: Callable[[], Record[Any] | None] = self._records().__next__
        """Acknowledges the record in hand; the next one, or None if there is none at this moment."""

    # one record after another

    def _records(self) -> Iterator[Record[Any] | None]:
        """For ever. A generator, since it is asked for every record: it remembers where it is at no cost."""
        turn, decode = self._feed.turn, self._handling.decode
        may_start = self._feed.may_start
        while True:
            taken = None if self._is_to_turn() else self._feed.take()
            if taken is None:
                yield None
                continue
            session, self._stretch = taken
            self._since_turn += len(self._stretch)
            self._session, self._handed_out, self._acknowledged = session, 0, 0
            for place, record in enumerate(self._stretch, 1):
                while session.is_live and (session.drains or not may_start(turn.over_ms)):
                    self.wants_turn = turn.is_over()
                    if not self.wants_turn:
                        self._feed.on_ended(session)  # fenced, or to be handed over: both may end without that
                    yield None
                if not session.is_live:
                    break
                try:
                    decoded = record if decode is None else decode(record)
                except UndecodableError as error:
                    self._stop_at(session, error)
                    break
                self._handed_out = place
                yield decoded
                self._acknowledged = place
            self.settle()
            self._drop()

    # batch after batch

    def next_batch(self) -> Batch[Any] | None:
        """Acknowledges the batch in hand; the next one, or None if there is none at this moment."""
        self._acknowledged = self._handed_out
        session, undecodable = self._session, self._undecodable
        self.settle()
        if session is not None and undecodable is not None and session.is_live:
            self._stop_at(session, undecodable)
        while True:
            taken = None if self._is_to_turn() else self._feed.take()
            if taken is None:
                return None
            session, stretch = taken
            self._since_turn += len(stretch)
            self._session, self._stretch, self._acknowledged = session, stretch, 0
            records, self._undecodable = self._handling.decode_leading(stretch)
            if records:
                self._handed_out = len(records)
                return Batch(
                    stream=session.stream.name,
                    shard_id=session.shard_id,
                    records=records,
                    millis_behind_latest=session.behind_ms,
                )
            assert self._undecodable is not None, "a batch has at least one record"
            self._stop_at(session, self._undecodable)

    def _is_to_turn(self) -> bool:
        if self._since_turn < SLICE and not self._feed.turn.is_over():
            return False
        self._since_turn, self.wants_turn = 0, True
        return True

    # what does not decode stops its shard

    def _stop_at(self, session: Session, error: UndecodableError) -> None:
        self.settle()
        self._drop()
        self._on_undecodable(session, error)

    # what is acknowledged

    def acknowledge(self) -> None:
        """What is in hand is finished: the loop's body ended."""
        self._acknowledged = self._handed_out

    def settle(self) -> None:
        """Reports what is acknowledged: when a stretch is walked through, and before each commit."""
        session = self._session
        if session is None or not self._acknowledged or not session.is_live:
            return  # what is in hand of a lost shard stays there until the next is asked for: it still runs
        done = self._acknowledged == len(self._stretch)
        count = self._acknowledged
        if done:
            self._drop()
        self._feed.finish_through(session, count)

    def abandon(self) -> None:
        """What is in hand will not be acknowledged any more: who waits for it is told."""
        session = self._session
        self.settle()
        self._drop()
        if session is not None:
            self._feed.on_ended(session)

    @property
    def in_hand(self) -> tuple[Session, Record[bytes]] | None:
        """The first record that was handed out and is not acknowledged."""
        if self._session is None or self._handed_out == self._acknowledged:
            return None
        return self._session, self._stretch[self._acknowledged]

    def _drop(self) -> None:
        self._session, self._stretch, self._undecodable = None, [], None
        self._handed_out = self._acknowledged = 0

"""Ending in order: stop intake, wait for what runs, commit; with a deadline, and an account of what was left.

Used for one shard that is handed over, for one that stops at a record, and for all of them when the worker stops.
"""

from collections.abc import Awaitable, Callable, Sequence

from anabranch._engine.alarm import Alarm
from anabranch._engine.session import Session
from anabranch._ports.clock import Clock
from anabranch.records import Record

__all__ = ["Drain"]

Running = Callable[[], list[tuple[Session, Record[bytes]]]]

LAST_WORD_MS = 10_000
LAST_WORD_PAUSE_MS = 200


class Drain:
    def __init__(self, clock: Clock, running: Running) -> None:
        self._clock = clock
        self._running = running
        self._alarms: dict[Alarm, None] = {}
        self._latest_ms: int | None = None

    @property
    def waits(self) -> bool:
        return bool(self._alarms)

    def note(self) -> None:
        """A call ended."""
        for alarm in self._alarms:
            alarm.ring()

    def hurry(self, deadline_ms: int) -> None:
        """Nothing is waited for any longer than this, whatever was said before."""
        self._latest_ms = deadline_ms
        self.note()

    def still_running(self, sessions: Sequence[Session]) -> list[Record[bytes]]:
        return [record for session, record in self._running() if session in sessions]

    async def wait(self, sessions: Sequence[Session], deadline_ms: int) -> list[Record[bytes]]:
        """Starts nothing more of these sessions and waits for what runs; what still runs at the deadline."""
        for session in sessions:
            session.drains = True
        alarm = Alarm(self._clock)
        self._alarms[alarm] = None
        try:
            while left := self.still_running(sessions):
                until_ms = deadline_ms if self._latest_ms is None else min(deadline_ms, self._latest_ms)
                if self._clock.now_ms() >= until_ms:
                    break
                await alarm.wait(until_ms)
        finally:
            del self._alarms[alarm]
        return left

    async def last_word(self, write: Callable[[], Awaitable[bool]], deadline_ms: int) -> bool:
        """Repeats a write until the store has taken it, or time is up: one lost answer must not cost what was finished
        since the last commit, nor the expiry of the leases.
        """
        give_up_ms = min(deadline_ms, self._clock.now_ms() + LAST_WORD_MS)
        while not await write():
            pause_until_ms = self._clock.now_ms() + LAST_WORD_PAUSE_MS
            if pause_until_ms >= min(give_up_ms, self._latest_ms or give_up_ms):
                return False
            await self._clock.sleep_until_ms(pause_until_ms)
        return True

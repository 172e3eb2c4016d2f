"""Ends the process before another member can start what still runs in this one (rule L11), for who asked for that.

For sinks that cannot refuse a late write by its fence token. It runs on the heart's thread, since what outlives its
lease may be what keeps the main loop from turning. The fence's time and the grace are up before the others may begin.
"""

import os
from collections.abc import Callable, Sequence

from anabranch._core.leases.heartbeat import HeartbeatState
from anabranch._ports import Clock
from anabranch.events import Event

__all__ = ["EXIT_STATUS", "ZombieGuard"]

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h: whoever runs the process should start it again."""

LOOKS_IN_SLACK = 3


class ZombieGuard:
    def __init__(
        self,
        heart: HeartbeatState,
        clock: Clock,
        zombies: Callable[[], Sequence[Event]],
        emit: Callable[[Event], None],
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._heart = heart
        self._clock = clock
        self._zombies = zombies
        self._emit = emit
        self._end_process = end_process

    async def run(self) -> None:
        timing, valid_until_ms = self._heart.timing, 0
        while True:
            fence = self._heart.status.fence
            if fence.ending == "left":
                return
            valid_until_ms = fence.valid_until_ms or valid_until_ms
            due_ms, now_ms = valid_until_ms + timing.grace_ms, self._clock.now_ms()
            if now_ms >= due_ms and (zombies := self._zombies()):
                for event in zombies:
                    self._emit(event)
                self._end_process(EXIT_STATUS)
                return
            await self._clock.sleep_until_ms(max(due_ms, now_ms + timing.slack_ms // LOOKS_IN_SLACK))

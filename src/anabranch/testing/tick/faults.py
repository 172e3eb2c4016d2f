"""What goes wrong in a world of the tick simulation, and when."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.testing.tick.world import World

__all__ = ["Faults"]

_LONG = (0.1, 2.5)
_SHORT = (0.005, 0.1)
_RESTART = (0.02, 0.6)
"""In expiries."""


class Faults:
    """Each kind strikes again and again, at random times with the given mean, until the faults end."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._ended = False
        options = world.options
        self._long_ms, self._short_ms = options.expiries(*_LONG), options.expiries(*_SHORT)
        self._restart_ms = options.expiries(*_RESTART)
        for index in range(options.worker_count):
            self._each(options.pause_every_ms, self._pause, index)
            self._each(options.stall_every_ms, self._stall, index)
            self._each(options.partition_every_ms, self._cut_off, index)
            self._each(options.crash_every_ms, self._crash, index)
            self._each(options.stop_every_ms, self._stop, index)
            self._each(options.row_deletion_every_ms, self._delete_row, index)
        self._each(options.roll_back_every_ms, self._roll_back, 0)
        for is_wanted, action in (
            (options.outage_ms, self._go_away),
            (options.reset, self._reset),
        ):
            if is_wanted:
                world.agenda.at(world.dice.between(options.faulty_ms // 8, options.faulty_ms), action)

    def end(self) -> None:
        """Whatever is still broken is mended now; messages on their way stay so."""
        self._ended = True
        self._world.store.is_away = False
        for worker in self._world.workers:
            worker.link.calm_down()

    def _each(self, mean_ms: int, action: Callable[[int], None], index: int) -> None:
        if mean_ms:
            wait_ms = 1 + int(self._world.dice.wait(1 / mean_ms))
            self._world.agenda.after(wait_ms, self._strike, mean_ms, action, index)

    def _strike(self, mean_ms: int, action: Callable[[int], None], index: int) -> None:
        if not self._ended:
            action(index)
            self._each(mean_ms, action, index)

    def _duration_ms(self) -> int:
        return self._world.dice.between(*(self._long_ms if self._world.dice.random() < 0.7 else self._short_ms))

    def _pause(self, index: int) -> None:
        self._world.workers[index].process.pause(self._duration_ms())

    def _stall(self, index: int) -> None:
        self._world.workers[index].process.stall(self._duration_ms())

    def _cut_off(self, index: int) -> None:
        self._world.workers[index].link.cut_until_ms = self._world.agenda.now_ms + self._duration_ms()

    def _crash(self, index: int) -> None:
        self._world.workers[index].process.kill()
        self._start_again(index)

    def _stop(self, index: int) -> None:
        worker = self._world.workers[index]
        if not worker.is_draining:
            worker.process.deliver("main", worker.stop)
            self._start_again(index)

    def _start_again(self, index: int) -> None:
        old = self._world.workers[index]

        def start() -> None:
            if self._world.workers[index] is old:
                self._world.workers[index] = self._world.start_worker(index)

        self._world.agenda.after(self._world.dice.between(*self._restart_ms), start)

    def _delete_row(self, index: int) -> None:
        world = self._world
        world.store.now_ms = world.agenda.now_ms
        world.store.remove_member(world.workers[index].table.member_id)

    def _go_away(self) -> None:
        world = self._world
        world.store.is_away = True
        world.agenda.after(world.options.outage_ms, self._come_back)

    def _come_back(self) -> None:
        self._world.store.is_away = False

    def _roll_back(self, _: int) -> None:
        world = self._world
        world.store.now_ms = world.agenda.now_ms
        world.journal.store_went_back = True
        world.store.roll_back(world.options.roll_back_ms)

    def _reset(self) -> None:
        world = self._world
        world.store.now_ms = world.agenda.now_ms
        world.store.reset()
        for index in range(0, world.options.worker_count, 2):
            self._crash(index)

"""What goes wrong in a simulated fleet, and when: drawn from the seed, until the faults end."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from anabranch.testing.journal import ProcessDied
from anabranch.testing.world.options import Scene

if TYPE_CHECKING:
    from anabranch.testing.world.world import Fleet

__all__ = ["Faults"]


class Faults:
    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._ended = False
        options = fleet.options
        for index in range(options.worker_count):
            self._each(options.pauses_each, self._pause, index)
            self._each(options.stalls_each, self._stall, index)
            self._each(options.cuts_each, self._cut_off, index)
            self._each(options.crashes_each, self._crash, index)
            self._each(options.stops_each, self._stop, index)
        self._each(options.reshards_each, lambda _: fleet.stream.reshard(), 0)
        self._each(options.rescales_each, lambda _: fleet.stream.rescale(), 0)
        if options.trims:
            self._loop().call_later(fleet.random.uniform(20, 40), self._trim)
        for at_seconds, scene in options.script:
            self._loop().call_later(at_seconds, self._play, scene)
        self._mind()
        if options.store_outage_seconds:
            self._once(self._store_goes_away)
        if options.store_is_emptied:
            self._once(self._store_is_emptied)
        if options.deleted:
            self._loop().call_later(fleet.random.uniform(3, options.faulty_seconds / 2), self._stream_is_deleted)
        if options.roll_back_seconds and options.roll_backs_each:
            self._each(options.roll_backs_each, lambda _: self._store_goes_back(), 0)
        elif options.roll_back_seconds:
            self._once(self._store_goes_back)

    def end(self) -> None:
        self._ended = True
        self._fleet.network.away_until.clear()
        for worker in self._fleet.workers:
            worker.process.cut_until.clear()

    def _mind(self) -> None:
        """A process that ended by itself is started again by whoever runs the fleet."""
        if self._ended:
            return
        for index, worker in enumerate(self._fleet.workers):
            if worker.task.done() and not worker.is_stopping:
                self._fleet.workers[index] = self._fleet.start_worker(index)
        self._loop().call_later(1.0, self._mind)

    def _play(self, scene: Scene) -> None:
        """One scene of the script; what strikes a worker strikes one that the seed draws."""
        index = self._fleet.random.randrange(self._fleet.options.worker_count)
        match scene:
            case "split":
                self._fleet.stream.split()
            case "merge":
                self._fleet.stream.merge()
            case "crash":
                self._crash(index)
            case "cut_off":
                self._cut_off(index)
            case "pause":
                self._pause(index)
            case "rescale":
                self._fleet.stream.rescale()
            case "stop":
                self._stop(index)

    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._fleet.loop

    def _once(self, action: Callable[[], None]) -> None:
        self._loop().call_later(self._fleet.random.uniform(3, self._fleet.options.faulty_seconds), action)

    def _each(self, mean: float, action: Callable[[int], object], index: int) -> None:
        if mean:
            wait = self._fleet.random.expovariate(1 / mean)
            self._loop().call_later(wait, self._strike, mean, action, index)

    def _strike(self, mean: float, action: Callable[[int], object], index: int) -> None:
        if not self._ended:
            action(index)
            self._each(mean, action, index)

    def _duration(self) -> float:
        random = self._fleet.random
        return random.uniform(1, 25) if random.random() < 0.7 else random.uniform(0.05, 1)

    def _pause(self, index: int) -> None:
        self._fleet.workers[index].process.pause(self._duration())

    def _stall(self, index: int) -> None:
        self._fleet.workers[index].process.stall(self._duration())

    def _cut_off(self, index: int) -> None:
        process, seconds = self._fleet.workers[index].process, self._duration()
        for place in self._fleet.random.choice([("store",), ("stream",), ("store", "stream")]):
            process.cut_until[place] = self._loop().time() + seconds
            if place == "store":
                process.hinder(seconds)

    def _crash(self, index: int) -> None:
        process = self._fleet.workers[index].process
        process.is_alive = False
        self._fleet.journal.tell(ProcessDied(process.world_ms(), process.name))
        self._start_again(index)

    def _stop(self, index: int) -> None:
        worker = self._fleet.workers[index]
        if worker.process.is_alive and not worker.is_stopping:
            worker.stop()
            self._start_again(index)

    def _start_again(self, index: int) -> None:
        old = self._fleet.workers[index]

        def start() -> None:
            if self._fleet.workers[index] is old:
                self._fleet.workers[index] = self._fleet.start_worker(index)

        self._loop().call_later(self._fleet.random.uniform(0.2, 12), start)

    def _store_goes_away(self) -> None:
        seconds = self._fleet.options.store_outage_seconds
        self._fleet.network.away_until["store"] = self._loop().time() + seconds
        for worker in self._fleet.workers:
            worker.process.hinder(seconds)

    def _store_goes_back(self) -> None:
        if not self._ended:
            self._fleet.rows.go_back(int(self._fleet.options.roll_back_seconds * 1000))

    def _trim(self) -> None:
        """Not in quick succession: what is new at one leap would be a day old at the next, and gone unread."""
        if self._fleet.options.trims_unread and not self._fleet.rows.have_begun:
            self._loop().call_later(1.0, self._trim)
        elif not self._ended:
            shortest = 0 if self._fleet.options.trims_unread else 25
            self._fleet.stream.leap(self._fleet.random.uniform(shortest, shortest + 5))
            self._loop().call_later(self._fleet.random.uniform(35, 45), self._trim)

    def _store_is_emptied(self) -> None:
        at_work = [worker.process.name for worker in self._fleet.workers if worker.is_at_work]
        self._fleet.rows.empty(at_work, moves=self._fleet.random.random() < 0.5)

    def _stream_is_deleted(self) -> None:
        self._fleet.stream.delete(is_known=self._fleet.rows.has_streams)
        self._loop().call_later(self._fleet.random.uniform(15, 30), self._stream_comes_back)

    def _stream_comes_back(self) -> None:
        """As slowly as with the service: everybody who runs has asked for it meanwhile. In the end it does in any case:
        otherwise nothing more could be written.
        """
        if all(worker.process.is_well_since(self._loop().time() - 8) for worker in self._fleet.workers):
            self._fleet.stream.create(self._fleet.options.shard_count)
        else:
            self._loop().call_later(1.0, self._stream_comes_back)

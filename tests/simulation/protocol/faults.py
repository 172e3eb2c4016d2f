"""What a world is like and what goes wrong in it, and when: drawn from its seed before it runs.

Each world gets its own mix, and leaves most faults out: worlds that have everything at once hide the bugs that need a
long calm stretch before one fault.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from protocol.world import World

_EXPIRIES_MS = ((10_000,), (5_000,), (3_000,), (10_000, 5_000), (5_000, 3_000), (5_000, 10_000, 3_000))


class Dice:
    """All chances of a world come from one seed. Quicker than `random.Random`, since a world throws them a thousand
    times. Not every number is exactly as likely as the next, which does not matter here.
    """

    __slots__ = ("getrandbits", "random", "wait")

    def __init__(self, seed: str) -> None:
        source = Random(seed)
        self.random = source.random
        """A share: from 0 to just under 1."""
        self.getrandbits = source.getrandbits
        self.wait = source.expovariate

    def randrange(self, start: int, stop: int, /) -> int:
        return self.between(start, stop)

    def between(self, low: int, high: int) -> int:
        """From `low` to `high - 1`."""
        return low + int(self.random() * (high - low))


class WorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    worker_count: int = 3
    lease_count: int = 1
    stream_count: int = 1
    """With two, every third worker reads both, and the others one each, as in the middle of a deploy."""
    faulty_ms: int = 240_000
    """How long faults go on; then the world has to settle."""
    settling_ms: int = 100_000
    """How long it then runs on without any; whether it has settled is judged if that is long enough for it."""
    expiry_ms: tuple[int, ...] = (10_000,)
    """Given to the workers in turn: a fleet in the middle of a deploy has two."""
    polls_per_expiry: int = 10
    """How often the member rows are read. Large fleets do so less often, and see less of what happens in between."""
    lost: float = 0.0
    """The share of requests that get lost, and of answers."""
    late: float = 0.0
    """The share of messages that are late by 0.15 to 1.4 expiries; requests take effect even though the caller has
    given up.
    """
    repeated: float = 0.0
    """The share of requests that take effect twice."""
    lag_ms_max: int = 0
    """Reads may show the store as it was this long ago."""
    clock_error: float = 0.0
    """How much faster or slower a worker's clock may run; 0.01 is 1 %."""
    clocks_stop: bool = False
    """Whether clocks stand still while their machine is paused."""
    pause_every_ms: int = 0
    """Mean time between two pauses of a worker; 0: none."""
    stall_every_ms: int = 0
    """As pauses, of all but the heartbeats."""
    gaps: float = 0.0
    """The share of starts that are paused between the look at the clock and the call."""
    partition_every_ms: int = 0
    crash_every_ms: int = 0
    stop_every_ms: int = 0
    """Mean time between two clean stops of a worker, each followed by a start."""
    outage_ms: int = 0
    """Once, the store is away for so long."""
    roll_back_every_ms: int = 0
    """Mean time between two times that the store goes back in time, and says that it is another one."""
    roll_back_ms: int = 10_000
    """How far it goes back."""
    reset: bool = False
    """Once, the store loses everything; fresh workers find a new application."""
    row_deletion_every_ms: int = 0
    """Mean time between two deletions of a live member's row by somebody's hand."""
    commit_every_ms: int = 2_000
    overruns: float = 0.0
    """The share of handler calls that take 4 to 20 s."""
    joins_every_ms: int = 0
    """Time between the starts of two workers; 0: all start at once."""
    same_worker_id: bool = False
    """All workers are configured with one worker id."""
    forced_hand_offs: bool = False
    """A call that outlasts a hand-off's deadline is told to end; else its lease is kept."""
    read_pause_ms: int = 0
    """How long a worker waits between two reads of all leases, as in a fleet of a hundred workers."""

    def expiries(self, low: float, high: float) -> tuple[int, int]:
        """A span of time, told in the longest expiry of the fleet: faults that matter are about as long as that."""
        longest_ms = max(self.expiry_ms)
        return int(longest_ms * low), int(longest_ms * high)


def options_for(seed: int) -> WorldOptions:
    """The mix of one seed. Every fault is in a good part of the worlds, none in all of them.

    Most worlds are small, short and dense: a few expiries long, with a fault every few seconds. Every 25th is a large
    fleet, and every 30th has to settle.
    """
    dice = Dice(f"options {seed}")
    large = seed % 25 == 24
    expiry_ms = _EXPIRIES_MS[dice.between(0, len(_EXPIRIES_MS))]
    longest_ms = max(expiry_ms)

    def expiries(low: float, high: float) -> int:
        return int(longest_ms * (low + dice.random() * (high - low)))

    def sometimes(chance: float, low: float, high: float) -> int:
        return expiries(low, high) if dice.random() < chance else 0

    def one_of(*shares: float) -> float:
        return shares[dice.between(0, len(shares))]

    return WorldOptions(
        worker_count=dice.between(5, 8) if large else dice.between(2, 4),
        lease_count=dice.between(6, 12) if large else dice.between(1, 5),
        faulty_ms=expiries(3, 6),
        settling_ms=100_000 if seed % 30 == 29 else 0,
        expiry_ms=expiry_ms,
        polls_per_expiry=10 if dice.random() < 0.5 else 5,
        lost=one_of(0.0, 0.01, 0.04, 0.1),
        late=one_of(0.0, 0.03, 0.1, 0.15),
        repeated=one_of(0.0, 0.0, 0.02),
        lag_ms_max=sometimes(0.2, 0.05, 1.6),
        clock_error=one_of(0.0, 0.005, 0.01),
        clocks_stop=dice.random() < 0.25,
        pause_every_ms=sometimes(0.6, 1, 4),
        stall_every_ms=sometimes(0.25, 1, 4),
        gaps=one_of(0.0, 0.0, 0.03),
        partition_every_ms=sometimes(0.6, 1, 4),
        crash_every_ms=sometimes(0.35, 1.5, 6),
        stop_every_ms=sometimes(0.4, 1, 4),
        outage_ms=sometimes(0.1, 0.3, 2),
        roll_back_every_ms=sometimes(0.15, 1, 4),
        roll_back_ms=expiries(0.05, 2),
        reset=dice.random() < 0.03,
        row_deletion_every_ms=sometimes(0.1, 1, 4),
        commit_every_ms=(1_000, 2_000, 10_000)[dice.between(0, 3)],
        overruns=one_of(0.0, 0.0, 0.05),
        same_worker_id=dice.random() < 0.2,
        forced_hand_offs=dice.random() < 0.4,
        joins_every_ms=sometimes(0.2, 0.1, 1),
        stream_count=2 if dice.random() < 0.15 else 1,
        read_pause_ms=sometimes(0.2, 0.3, 2),
    )


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
        self._world.storage.is_away = False
        for worker in self._world.workers:
            worker.link.calm_down()

    def _each(self, mean_ms: int, action: Callable[[int], None], index: int) -> None:
        if mean_ms:
            wait_ms = 1 + int(self._world.dice.wait(1 / mean_ms))
            self._world.agenda.after(wait_ms, self._strike, mean_ms, action, index)

    def _strike(self, mean_ms: int, action: Callable[[int], None], index: int) -> None:
        if not self._ended:
            if index < len(self._world.workers):
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
        if not worker.machine.draining:
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
        world.storage.now_ms = world.agenda.now_ms
        world.storage.remove_member(world.workers[index].machine.member_id)

    def _go_away(self) -> None:
        world = self._world
        world.storage.is_away = True
        world.agenda.after(world.options.outage_ms, self._come_back)

    def _come_back(self) -> None:
        self._world.storage.is_away = False

    def _roll_back(self, _: int) -> None:
        world = self._world
        world.storage.now_ms = world.agenda.now_ms
        world.journal.store_went_back = True
        world.storage.roll_back(world.options.roll_back_ms)

    def _reset(self) -> None:
        world = self._world
        world.storage.now_ms = world.agenda.now_ms
        world.storage.reset()
        for index in range(0, len(world.workers), 2):
            self._crash(index)

"""A redrive that crashes between any two steps, again and again: no letter is lost, each key stays in order, and what
fails ends in one place. Redrives that are broken in one way each are caught.
"""

import asyncio
import random
from collections import Counter

import pytest

from anabranch import Retry
from anabranch._core.redrive import LetterFilter
from anabranch.dead_letters.destinations import StoredLetter
from anabranch.dead_letters.redrive import Redrive, RedriveSettings
from letter_samples import a_letter

SEEDS = range(60)
LIVES_MAX = 200
CONCURRENCY_MAX = 3


class CrashError(BaseException):
    """The process is gone."""


class World:
    """What outlives a process: the box, the review destination, and what the handler did. A crash may strike before and
    after each step.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.letters = {number: a_letter(number, key=f"key-{self.random.randrange(3)}") for number in range(12)}
        self.box = dict(self.letters)
        self.review = {}
        self.journal = []
        self.poison = {number for number in self.letters if self.random.random() < 0.2}
        self.failures_left = {number: self.random.choice([0, 0, 0, 1, 2]) for number in self.letters}
        self.crash_chance = self.random.choice([0.0, 0.02, 0.1])
        self.crashes = 0
        self.killers = set()

    async def step(self):
        await asyncio.sleep(0)
        if self.random.random() < self.crash_chance:
            self.crashes += 1
            raise CrashError


def number_of(letter):
    return int(letter.sequence_number)


class Box:
    reveals_more = False

    def __init__(self, world):
        self.world = world
        self.unreadable = []

    async def hold(self, owner):
        await self.world.step()

    async def release(self):
        """Nobody else redrives."""

    async def read(self):
        for number, letter in sorted(self.world.box.items()):
            await self.world.step()
            yield StoredLetter(letter, number)

    async def begin(self, stored, letter):
        await self.world.step()
        self.world.box[stored.handle] = letter
        self.world.journal.append(("begun", stored.handle))
        await self.world.step()
        return StoredLetter(letter, stored.handle)

    async def replace(self, stored, letter):
        await self.world.step()
        self.world.box[stored.handle] = letter
        await self.world.step()

    async def delete(self, stored):
        await self.world.step()
        del self.world.box[stored.handle]
        await self.world.step()


class Review:
    def __init__(self, world):
        self.world = world

    async def write(self, letter):
        await self.world.step()
        self.world.review[number_of(letter)] = letter
        await self.world.step()


class Handler:
    def __init__(self, world):
        self.world = world

    async def deliver(self, letter, attempt):
        world, number = self.world, number_of(letter)
        world.journal.append(("start", number))
        await world.step()
        if number in world.killers:
            world.crashes += 1
            raise CrashError
        if number in world.poison:
            raise ValueError(number)
        if world.failures_left[number]:
            world.failures_left[number] -= 1
            raise TimeoutError(number)
        world.journal.append(("handled", number))
        await world.step()

    async def close(self):
        """Nothing is open."""


def live(world, redrive_type, *, with_review=True):
    """One life of a process; None if it crashed."""
    redrive = redrive_type(
        box=Box(world),
        owner="me",
        delivery=Handler(world),
        settings=RedriveSettings(
            policy=Retry(attempts=3, backoff=0.0, backoff_max=0.0),
            concurrency=world.random.choice([1, CONCURRENCY_MAX]),
        ),
        review=Review(world) if with_review else None,
        accepts=lambda letter: True,
        stop=asyncio.Event(),
        on_progress=lambda report: None,
        aws=None,
    )
    try:
        return asyncio.run(redrive.run(LetterFilter()))
    except CrashError:
        return None


def is_cut_off(world, number):
    """Whether it is in review because three redrives died with it: those had begun, and the last one called nothing."""
    begun = world.journal.count(("begun", number))
    return number in world.review and world.review[number].error_type == "ProcessDied" and begun == 3


def violations(world):
    """What is wrong at the end, told from the journal and the places alone."""
    handled = Counter(number for what, number in world.journal if what == "handled")
    for number, letter in world.letters.items():
        # What was handled, and not removed since the process died each time, is in review, too: nothing tells it apart.
        was_cut_off = is_cut_off(world, number)
        places = [handled[number] > 0 and not was_cut_off, number in world.review, number in world.box]
        if places.count(True) != 1:
            yield f"letter {number} is {'lost' if not any(places) else 'in two places'}: {places}"
        if number in world.review and world.review[number].payload != letter.payload:
            yield f"letter {number} has changed"
    if sum(handled.values()) > len(handled) + CONCURRENCY_MAX * world.crashes:
        yield "letters were handled twice without a crash"
    yield from order_violations(world)


def order_violations(world):
    """Of one key no letter starts before the earlier ones are done, unless a crash repeats it."""
    latest = {}
    for what, number in world.journal:
        key = world.letters[number].partition_key
        if what == "start" and number < latest.get(key, -1):
            yield f"letter {number} of {key} starts after {latest[key]}"
        latest[key] = max(latest.get(key, -1), number)


def run_world(seed, redrive_type=Redrive):
    world = World(seed)
    for _ in range(LIVES_MAX):
        if live(world, redrive_type) is not None:
            return world
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_no_letter_is_lost_and_each_key_stays_in_order(seed):
    world = run_world(seed)
    assert list(violations(world)) == []
    cut_off = {number for number in world.letters if is_cut_off(world, number)}
    assert set(world.review) | cut_off == world.poison | cut_off
    assert world.crashes >= 3 or not cut_off


def test_the_worlds_have_crashes_poison_and_repeats():
    worlds = [run_world(seed) for seed in SEEDS]
    assert sum(world.crashes for world in worlds) > 100
    assert sum(len(world.poison) for world in worlds) > 50


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_review_destination_what_failed_stays_and_nothing_of_its_key_passes_it(seed):
    world = World(seed)
    world.crash_chance = 0.0
    report = live(world, Redrive, with_review=False)
    handled = {number for what, number in world.journal if what == "handled"}
    assert handled | set(world.box) == set(world.letters)
    assert not handled & set(world.box)
    for number, letter in world.box.items():
        earlier = [n for n in world.box if n < number and world.box[n].partition_key == letter.partition_key]
        assert number in world.poison or earlier, f"letter {number} stays without a reason"
        assert letter.redrive_count == (1 if not earlier else 0)
    assert report.failed + report.held_back == len(world.box)


@pytest.mark.parametrize("seed", SEEDS)
def test_letters_that_kill_the_process_go_to_review_after_three_calls_and_no_others_do(seed):
    world = World(seed)
    world.crash_chance, world.poison = 0.0, set()
    world.killers = set(world.random.sample(sorted(world.letters), 2))
    lives = 1
    while live(world, Redrive) is None:
        lives += 1
        assert lives <= 3 * len(world.killers) + 1, "they are redriven forever"
    started = Counter(number for what, number in world.journal if what == "start")
    assert {number: started[number] for number in world.killers} == dict.fromkeys(world.killers, 3)
    assert {number: letter.error_type for number, letter in world.review.items()} == dict.fromkeys(
        world.killers, "ProcessDied"
    )
    assert {letter.attempts for letter in world.review.values()} == {3}
    assert list(violations(world)) == []


class DeletesFirst(Redrive):
    async def _deliver(self, letter):
        await self.box.delete(StoredLetter(letter, number_of(letter)))
        return await super()._deliver(letter)

    async def _remove(self, stored, *, with_overflow=True):
        """Already done."""


class ReviewsLast(Redrive):
    async def _settle_failed(self, stored, whole, failure, calls_at):
        await self._remove(stored)
        await self.review.write(whole)
        self._tally.settle(stored.letter, "reviewed")


class ForgetsReview(Redrive):
    async def _settle_failed(self, stored, whole, failure, calls_at):
        await self._remove(stored)
        self._tally.settle(stored.letter, "reviewed")


class KeepsWhatItReviewed(Redrive):
    async def _settle_failed(self, stored, whole, failure, calls_at):
        await self.review.write(whole)
        self._tally.settle(stored.letter, "reviewed")


class IgnoresOrder(Redrive):
    async def _after(self, previous, stored):
        if number_of(stored.letter) % 2 == 0:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await super()._after(None, stored)


class NeverRemoves(Redrive):
    async def _remove(self, stored, *, with_overflow=True):
        """The next run delivers it again."""


@pytest.mark.parametrize(
    "broken, promise",
    [
        (DeletesFirst, "lost"),
        (ReviewsLast, "lost"),
        (ForgetsReview, "lost"),
        (KeepsWhatItReviewed, "two places"),
        (IgnoresOrder, "starts after"),
        (NeverRemoves, "two places"),
    ],
)
def test_a_redrive_that_is_broken_in_one_way_is_caught(broken, promise):
    assert any(promise in text for seed in SEEDS for text in violations(run_world(seed, broken))), promise

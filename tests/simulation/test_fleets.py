"""Simulated fleets of real engines keep every promise over many seeds, and planted mistakes are noticed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from fleets import FLEETS, fleet_options_for, run_seed
from harsh.lease_store import OneApplication, RowMade
from harsh.options import ConsumeMode, HarshOptions
from seed_search import search
from variants.engine_variants import MISTAKES

from anabranch.testing.journal import Journal, StoreEmptied

REGRESSIONS = [
    int(line.split()[1])
    for line in Path(__file__).with_name("regressions.txt").read_text().splitlines()
    if line.startswith("fleet ")
]


FIRST_TRIED = {
    "a child starts although its parent's row was deleted": 16,
    "a lease is taken from an owner that was not sealed": 5,
    "a new owner handles a record that is on its way to the dead letters": 7,
    "an error in the loop's body hides the consumer's error": 8,
    "child shards do not wait for their parents": 10,
    "running calls are not cancelled at the fence": 2,
    "the application's row does not name its storage": 7,
    "the read position moves back where two reads overlap": 9,
}
"""Seeds that notice these mistakes, if nobody has changed the draws since: otherwise the search only takes longer."""


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_fleet_that_once_broke_a_promise_keeps_it(seed):
    assert run_seed(seed).violations == ()


@pytest.mark.parametrize(
    "first", [*range(0, 100, 20), *(pytest.param(first, marks=pytest.mark.long) for first in range(100, 200, 20))]
)
def test_no_fleet_breaks_a_promise(first):
    for seed in range(first, first + 20):
        verdict = run_seed(seed)
        assert verdict.violations == (), f"python tests/simulation/fleets.py --seed {seed}"
        not_started = verdict.excuses + verdict.skips + verdict.letters  # in a loop, poison does not decode
        assert verdict.starts >= verdict.writes - not_started


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_noticed_within_fifty_seeds(name, monkeypatch):
    mistake = MISTAKES[name]
    mistake.plant(monkeypatch)
    for seed in (FIRST_TRIED.get(name, 0), *range(50)):
        verdict = run_seed(seed, mistake.options)
        if any(violation.promise == mistake.promise for violation in verdict.violations):
            return
    pytest.fail(f"{name} was not noticed")


@pytest.mark.parametrize("name", MISTAKES)
def test_the_worlds_of_the_mistakes_are_clean_without_them(name):
    for seed in range(2):
        assert run_seed(seed, MISTAKES[name].options).violations == ()


@pytest.mark.parametrize(
    "seed, why",
    [
        (91, "a failed call hid a failover, and the round took leases in the new storage"),
        (2056, "a worker that was starting during a roll-back did not know the old storage, and took leases at once"),
    ],
)
def test_nothing_is_taken_too_early_after_a_roll_back(seed, why):
    options = HarshOptions(
        worker_count=4, shard_count=4, record_count=400, key_count=40, faulty_seconds=50, handler_seconds_max=0.3,
        roll_back_seconds=9, cut_off_every_seconds=9, stall_every_seconds=15, pause_every_seconds=15,
        stop_every_seconds=15, lost=0.05, late=0.05,
    )  # fmt: skip
    assert run_seed(seed, options).violations == (), why


def test_an_error_that_nobody_saw_is_in_the_verdict_of_every_run(monkeypatch):
    """The error appears when its task is collected. That must not depend on other allocations of the process."""
    name = "an error in the loop's body hides the consumer's error"
    mistake = MISTAKES[name]
    mistake.plant(monkeypatch)
    tried = (FIRST_TRIED[name], *range(50))
    seed = next(seed for seed in tried if run_seed(seed, mistake.options).violations)
    verdicts = []
    for _ in range(3):
        verdicts.append(run_seed(seed, mistake.options))
        allocated = [[number] for number in range(5_000)]
    assert allocated
    assert verdicts[0].violations
    assert verdicts[0] == verdicts[1] == verdicts[2]


def test_a_process_that_creates_the_application_again_after_the_store_was_emptied_is_found():
    journal = Journal([OneApplication()])
    for fact in (StoreEmptied(("a",)), RowMade(2, "b", "a lease")):
        journal.tell(fact)
    assert journal.violations == []
    journal.tell(RowMade(3, "a", "a lease"))
    assert "a was running before" in journal.violations[0].what


def test_a_fleet_without_faults_repeats_nothing():
    verdict = run_seed(1, HarshOptions(worker_count=3, shard_count=4, record_count=200, faulty_seconds=20.0))
    assert verdict.violations == ()
    assert verdict.starts == 200


@pytest.mark.parametrize("interval", [0.1, 1.0])
@pytest.mark.parametrize("consume_mode", get_args(ConsumeMode))
def test_a_crash_in_the_midst_of_a_page_repeats_no_more_than_the_interval(consume_mode, interval):
    options = HarshOptions(
        consume_mode=consume_mode,
        worker_count=1,
        shard_count=1,
        record_count=200,
        backlog=0.8,
        checkpoint_seconds=interval,
        handler_seconds_max=0.3,
        faulty_seconds=20.0,
        script=((6.0, "crash"),),
    )
    assert [verdict.violations for verdict in (run_seed(seed, options) for seed in range(5))] == [()] * 5


def test_a_seed_is_the_same_fleet_in_every_process():
    code = (
        "from fleets import run_seed;"
        "print([(v.steps, v.seconds, v.starts, v.commits) for v in map(run_seed, (3, 10, 24))])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert runs[0] == runs[1]


def test_the_command_replays_a_seed_and_says_what_it_is_like(capsys):
    assert search(FLEETS, ["--seed", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"worker_count={fleet_options_for(2).worker_count}" in shown
    assert shown.endswith("clean\n")


def test_the_command_names_the_seed_and_the_way_to_replay_it(monkeypatch, capsys):
    mistake = MISTAKES["the checkpoint includes records that are not finished"]
    mistake.plant(monkeypatch)
    seed = next(seed for seed in range(50) if run_seed(seed).violations)
    assert search(FLEETS, ["--seed", str(seed)]) == 1
    assert "no loss: " in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_fresh_fleets_keep_their_promises():
    assert search(FLEETS, ["--worlds", "300", "--first", "1000", "--cores", "1"]) == 0


def test_a_record_that_a_loop_works_on_when_its_run_fails_is_reported_before_others_start_it():
    options = MISTAKES["an error in the loop's body hides the consumer's error"].options
    for seed in (1, 5, 6, 7):
        assert run_seed(seed, options).violations == ()

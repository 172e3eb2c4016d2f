"""The lease machine in the protocol simulation: clean over many worlds, and every broken variant is caught."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from protocol.faults import WorldOptions, options_for
from protocol.run import PROTOCOL
from protocol.variants import ROUGH, VARIANTS, NoGapRule
from protocol.world import run_world
from seed_search import search

from anabranch._core.leases.machine import LeaseMachine

REGRESSIONS = Path(__file__).with_name("regressions.txt")
OUTAGE = WorldOptions(lease_count=3, faulty_ms=90_000, outage_ms=30_000, settling_ms=20_000, clock_error=0.01)


def seeds_that_once_failed():
    lines = REGRESSIONS.read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("protocol ")]


def catches(variant, seed):
    verdict = run_world(seed, variant.options, machine_class=variant.machine_class, reader_class=variant.reader_class)
    return any(violation.what.startswith(variant.complaint) for violation in verdict.violations)


@pytest.mark.parametrize("first", range(0, 2_000, 250))
def test_no_world_breaks_a_promise(first):
    for seed in range(first, first + 250):
        assert run_world(seed).violations == (), f"{PROTOCOL.command} --seed {seed}"


@pytest.mark.parametrize("seed", seeds_that_once_failed())
def test_a_seed_that_once_failed_is_clean(seed):
    assert run_world(int(seed)).violations == ()


def test_the_worlds_of_the_evidence_table_are_clean():
    for seed in range(40):
        assert run_world(seed, replace(ROUGH, settling_ms=100_000)).violations == ()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_protocol_is_caught_within_fifty_seeds(name):
    assert any(catches(VARIANTS[name], seed) for seed in range(50)), f"{name} was not caught"


@pytest.mark.parametrize("name", ["take without seal", "hand-off by force", "fence by signal"])
def test_the_mixed_worlds_have_teeth_too(name):
    variant = VARIANTS[name]
    assert any(catches(variant._replace(options=options_for(seed)), seed) for seed in range(400)), name


def test_an_outage_of_the_store_moves_nothing():
    moves = {
        machine_class: sum(run_world(seed, OUTAGE, machine_class=machine_class).takes - 3 for seed in range(20))
        for machine_class in (LeaseMachine, NoGapRule)
    }
    assert moves[LeaseMachine] == 0
    assert moves[NoGapRule] > 0


def test_a_seed_is_the_same_world_in_every_process():
    code = (
        "from protocol.world import run_world;"
        "print([(v.events, v.starts, v.takes, v.repeats) for v in map(run_world, range(900, 910))])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parent)},
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert runs[0] == runs[1]


def test_every_fault_is_in_many_worlds_and_in_not_all():
    drawn = [options_for(seed) for seed in range(400)]
    for name in ("lost", "late", "repeated", "lag_ms_max", "clock_error", "clocks_stop", "pause_every_ms",
                 "stall_every_ms", "gaps", "partition_every_ms", "crash_every_ms", "stop_every_ms", "outage_ms",
                 "roll_back_every_ms", "reset", "row_deletion_every_ms", "overruns", "same_worker_id",
                 "forced_hand_offs", "joins_every_ms"):  # fmt: skip
        assert 0 < sum(bool(getattr(options, name)) for options in drawn) < 400, name
    assert 0 < sum(len(options.expiry_ms) > 1 for options in drawn) < 400
    assert 0 < sum(options.stream_count > 1 for options in drawn) < 400


def test_one_command_replays_a_world_and_tries_fresh_ones(capsys):
    assert search(PROTOCOL, ["--seed", "2"]) == 0
    assert capsys.readouterr().out.endswith("clean\n")
    assert search(PROTOCOL, ["--worlds", "201", "--first", "1000", "--cores", "1"]) == 0  # two chunks
    assert capsys.readouterr().out.endswith("all clean\n")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_fresh_worlds_keep_their_promises():
    assert search(PROTOCOL, ["--worlds", "2000", "--first", "1000", "--cores", "1"]) == 0

"""Fleets on the DynamoDB store keep every promise while its answers are lost, late or throttled; a store without one of
its conditions is noticed.
"""

import pytest
from dynamodb_fleet import SimulatedDynamoDbStore, dynamodb_options_for, run_dynamodb_seed
from harsh.options import HarshOptions


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_fleet_breaks_a_promise(first):
    for seed in range(first, first + 10):
        verdict = run_dynamodb_seed(seed)
        assert verdict.violations == (), f"python tests/simulation/dynamodb_fleet.py --seed {seed}"
        assert verdict.starts >= verdict.writes - verdict.excuses - verdict.skips - verdict.letters


@pytest.mark.long
@pytest.mark.parametrize("first", range(1_000, 1_200, 25))
def test_no_fleet_breaks_a_promise_in_many_worlds(first):
    for seed in range(first, first + 25):
        verdict = run_dynamodb_seed(seed)
        assert verdict.violations == (), f"python tests/simulation/dynamodb_fleet.py --seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_is_emptied_under_its_workers_ends_them_and_becomes_no_new_application(seed):
    options = HarshOptions(
        worker_count=3, shard_count=3, record_count=200, faulty_seconds=40, store_is_emptied=True, lost=0.02, late=0.02
    )
    assert run_dynamodb_seed(seed, options).violations == ()


def lax(operation):
    """A store that leaves the conditions of one operation out. One alone may be covered by the others."""

    class Lax(SimulatedDynamoDbStore):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            write = self.table.write

            async def lax_write(name, item_write, *, repeatable=False):
                if getattr(self, "is_lax", False):
                    item_write.conditions = []
                return await write(name, item_write, repeatable=repeatable)

            self.table.write = lax_write

        def _check_outcome(self, written, *, holds):
            """Here the promises must notice it."""

    async def perform(self, *arguments, **options):
        self.is_lax = True
        try:
            return await getattr(SimulatedDynamoDbStore, operation)(self, *arguments, **options)
        finally:
            self.is_lax = False

    setattr(Lax, operation, perform)
    return Lax


CUT_OFF = {"cut_off_every_seconds": 8.0, "crash_every_seconds": 20.0, "reshard_every_seconds": 8.0}


@pytest.mark.parametrize("operation, faults", [("write_lease", {}), ("take_lease", CUT_OFF), ("create_lease", CUT_OFF)])
def test_writes_without_their_conditions_are_noticed(operation, faults):
    options = HarshOptions(
        worker_count=4, shard_count=4, record_count=300, key_count=40, faulty_seconds=50, handler_seconds_max=0.3,
        lost=0.05, late=0.1, repeated=0.05, **faults,
    )  # fmt: skip
    for seed in range(40):
        if run_dynamodb_seed(seed, options, lax(operation)).violations:
            return
    pytest.fail("it was not noticed")


def test_a_seed_gives_the_same_fleet_every_time():
    seed = next(seed for seed in range(20) if dynamodb_options_for(seed).lost)
    assert run_dynamodb_seed(seed) == run_dynamodb_seed(seed)

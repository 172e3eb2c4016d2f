"""One worker through three times kill -9 and constant resharding, over real sockets."""

import asyncio

import pytest
from restarts import describe, run_restarts

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize("order, aggregate, seed", [("shard", False, 1), ("key", True, 2)])
def test_nothing_is_lost_or_out_of_order_and_repeats_are_only_what_was_not_committed(tmp_path, order, aggregate, seed):
    found = asyncio.run(
        run_restarts(str(tmp_path), records=30_000, order=order, aggregate=aggregate, seed=seed, patience=120)
    )
    print(describe(found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0
    assert found.splits
    assert found.merges

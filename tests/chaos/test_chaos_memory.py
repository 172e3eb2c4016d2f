"""A flood, records of 10 MiB among it, against a handler that sleeps: the budget is never overdrawn."""

import asyncio

import pytest
from flood import describe, run_flood

from anabranch.limits import MIB

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.mark.parametrize("reads", ["polling", "fanout"])
def test_counted_bytes_stay_within_the_budget_while_a_stream_floods(tmp_path, reads):
    held, total_bytes = asyncio.run(run_flood(str(tmp_path), reads=reads, shards=4, budget_bytes=96 * MIB, seconds=8))
    print(describe(held, total_bytes))
    assert held.handled_count
    assert held.peak_bytes <= held.limit_bytes < total_bytes
    assert held.shards_bytes <= held.peak_bytes

"""A flood, records of 10 MiB among it, against a handler that sleeps: the process stays within its budget."""

import asyncio

import pytest
from flood import describe, run_burst, run_flood

from anabranch.budget import READ_RESERVE_BYTES
from anabranch.limits import MIB

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.mark.parametrize("reads", ["polling", "fanout"])
def test_counted_bytes_stay_within_the_budget_while_a_stream_floods(tmp_path, reads):
    held, total_bytes = asyncio.run(run_flood(str(tmp_path), reads=reads, shards=4, budget_bytes=96 * MIB, seconds=8))
    print(describe(held, total_bytes))
    assert held.handled_count
    assert held.peak_bytes <= held.limit_bytes < total_bytes
    assert held.shards_bytes <= held.peak_bytes


def test_large_records_at_the_tips_of_many_shards_do_not_fill_the_memory(tmp_path):
    """The kernel's count, because the budget's own cannot see responses that it does not know of (rule B1)."""
    held, total_bytes = asyncio.run(run_burst(str(tmp_path), shards=24, budget_bytes=96 * MIB, seconds=8))
    print(describe(held, total_bytes))
    assert held.handled_count
    most_bytes = held.limit_bytes + READ_RESERVE_BYTES  # the overdraft
    assert held.peak_bytes <= most_bytes < total_bytes
    kept_buffers_bytes, slack_bytes = 32 * MIB, 32 * MIB
    assert held.rss_peak_bytes - held.rss_before_bytes <= most_bytes + kept_buffers_bytes + slack_bytes

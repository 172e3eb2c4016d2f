"""The demo's stage, as far as it needs no processes."""

import asyncio
from itertools import pairwise

from anabranch._demo.stage import PAUSE_SHARE, STORY, Stage


def test_a_stage_that_was_not_opened_can_be_closed(tmp_path, monkeypatch):
    """Ctrl-C may come before anything has started."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main():
        await Stage(asyncio.TaskGroup(), seed=1, seconds=1.0, records_per_second=1).close()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_what_an_event_stops_goes_on_before_the_next_event():
    """Otherwise the order of the story would depend on timing, whatever the seed."""
    for (part, _), (following, _) in pairwise(STORY):
        assert part + PAUSE_SHARE < following

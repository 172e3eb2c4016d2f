"""The demo's stage, as far as it needs no processes."""

import asyncio

from anabranch._demo.stage import Stage


def test_a_stage_that_was_not_opened_can_be_closed(tmp_path, monkeypatch):
    """Ctrl-C may come before anything has started."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main():
        await Stage(asyncio.TaskGroup(), seed=1, records_per_second=1).close()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []

"""The demo's stage, as far as it needs no processes."""

import asyncio
from pathlib import Path

from anabranch._demo.stage import Stage


def test_a_stage_that_was_not_opened_can_be_closed():
    """Ctrl-C may come before anything has started."""

    async def main():
        stage = Stage(seed=1, records_per_second=1)
        assert Path(stage._folder.name).exists()
        await stage.close()
        assert not Path(stage._folder.name).exists()

    asyncio.run(main())

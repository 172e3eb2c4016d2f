"""A signal ends every consumer of its process in order."""

import asyncio
import os
import signal

from stream_world import run, stream_world, until


def _has_joined(consumer):
    return consumer._consuming is not None and consumer._consuming.worker.has_joined


def test_a_signal_stops_every_consumer_that_runs():
    async def main():
        async with stream_world(1) as world:
            consumers = [world.consumer(app=app, leases="memory://") for app in ("billing", "shipping")]
            runs = [asyncio.create_task(consumer.run(lambda record: None)) for consumer in consumers]
            await until(lambda: all(map(_has_joined, consumers)), "both consumers")
            os.kill(os.getpid(), signal.SIGTERM)
            assert all(report.clean for report in await asyncio.gather(*runs))

    run(main, 10)


def test_the_end_of_one_run_leaves_the_signals_to_the_other():
    async def main():
        async with stream_world(1) as world:
            first, second = (world.consumer(app=app, leases="memory://") for app in ("billing", "shipping"))
            runs = [asyncio.create_task(consumer.run(lambda record: None)) for consumer in (first, second)]
            await until(lambda: _has_joined(first) and _has_joined(second), "both consumers")
            await second.stop()
            await runs[1]
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await runs[0]).clean

    run(main, 10)


def test_a_run_gives_the_signals_back():
    async def main():
        async with stream_world(1) as world:
            assert (await world.consumer(app="billing", leases="memory://", until="tip").run(lambda record: None)).clean

    before = signal.getsignal(signal.SIGTERM)
    run(main, 10)
    assert signal.getsignal(signal.SIGTERM) == before

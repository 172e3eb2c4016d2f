"""A signal stops every consumer of its process gracefully, unless the program handles that signal itself (rule O3)."""

import asyncio
import os
import signal
import sys
import threading

import pytest

from anabranch import Retry, events
from anabranch.errors import ConfigurationError, UsageError

from stream_world import run, stream_world, until

SIGNALS = [signal.SIGTERM, signal.SIGINT]

PREAMBLE = """
import asyncio, contextlib, signal, sys
from anabranch import Aws, Consumer
from stream_world import QUICK, Credentials

aws = Aws(region="us-east-1", endpoint_url=sys.argv[1], credentials=Credentials())
consumer = Consumer("orders", app="billing", leases="memory://", aws=aws, settings=QUICK)

async def handle(record):
    print("handled", flush=True)
"""

SCRIPT = f"""{PREAMBLE}
async def main():
    report = await consumer.run(handle)
    print("clean" if report.clean else "unclean")

asyncio.run(main())
"""

SERVER = f"""{PREAMBLE}
import uvicorn

@contextlib.asynccontextmanager
async def lifespan():
    running = asyncio.create_task(consumer.run(handle))
    yield
    print("shutdown")
    report = await consumer.stop()
    await running
    print("clean" if report.clean else "unclean")

async def app(scope, receive, send):
    assert scope["type"] == "lifespan"
    async with lifespan():
        await receive()
        await send({{"type": "lifespan.startup.complete"}})
        await receive()
    await send({{"type": "lifespan.shutdown.complete"}})

uvicorn.run(app, port=0, lifespan="on", log_level="error")
"""


async def _signal_program(program, number):
    """Its output, and its exit code, when it gets the signal after its first record."""
    async with stream_world(1) as world:
        world.put("a")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, world.kinesis.endpoint_url,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": "1"}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert await process.stdout.readline() == b"handled\n"
            process.send_signal(number)
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return output.decode().split(), process.returncode


def _outcomes(program, number):
    found = []

    async def main():
        found.extend(await _signal_program(program, number))

    run(main)
    return tuple(found)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_a_script_gracefully(number):
    assert _outcomes(SCRIPT, number) == (["clean"], 0)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_left_to_the_server_that_a_consumer_runs_in(number):
    """uvicorn shuts down, which stops the consumer, and then ends by the signal that it got."""
    output, code = _outcomes(SERVER, number)
    assert output == ["shutdown", "clean"]
    assert code == (-signal.SIGTERM if number == signal.SIGTERM else 0)


def _has_joined(consumer):
    return consumer._consumer_run is not None and consumer._consumer_run.has_joined


def _run_all(consumers, **options):
    return [asyncio.create_task(consumer.run(lambda record: None, **options)) for consumer in consumers]


def test_a_signal_stops_every_consumer_that_runs():
    async def main():
        async with stream_world(1) as world:
            consumers = [world.consumer(app=app, leases="memory://") for app in ("billing", "shipping")]
            runs = _run_all(consumers)
            await until(lambda: all(map(_has_joined, consumers)), "both consumers")
            os.kill(os.getpid(), signal.SIGTERM)
            assert all(report.clean for report in await asyncio.gather(*runs))

    run(main)


def test_the_end_of_one_run_leaves_the_signals_to_the_other():
    async def main():
        async with stream_world(1) as world:
            first, second = (world.consumer(app=app, leases="memory://") for app in ("billing", "shipping"))
            runs = _run_all((first, second))
            await until(lambda: _has_joined(first) and _has_joined(second), "both consumers")
            await second.stop()
            await runs[1]
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await runs[0]).clean

    run(main)


async def _signal_and_stop(world, number, has_come, **options):
    """Whether the signal alone stops the run; `has_come` says when the program itself has got it."""
    consumer = world.consumer(app="billing", leases="memory://")
    (running,) = _run_all((consumer,), **options)
    await until(lambda: _has_joined(consumer), "the consumer")
    os.kill(os.getpid(), number)
    await until(lambda: running.done() or has_come(), "the signal")
    was_stopped = consumer._consumer_run.is_stopping
    assert (await consumer.stop()).clean
    await running
    return was_stopped


@pytest.fixture
def dispositions():
    """Puts back what a test sets."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("dispositions")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_of_the_program_keeps_its_signal(number):
    seen = []

    def handler(*_):
        seen.append(number)

    async def main():
        async with stream_world(1) as world:
            signal.signal(number, handler)
            assert not await _signal_and_stop(world, number, lambda: seen)
            assert signal.getsignal(number) is handler

    run(main)
    assert seen == [number]


@pytest.mark.usefixtures("dispositions")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_of_the_event_loop_keeps_its_signal_and_still_has_it_after_the_run(number):
    seen = []

    async def main():
        async with stream_world(1) as world:
            asyncio.get_running_loop().add_signal_handler(number, seen.append, number)
            assert not await _signal_and_stop(world, number, lambda: seen)
            os.kill(os.getpid(), number)
            await until(lambda: len(seen) == 2, "the second signal")

    run(main)


@pytest.mark.usefixtures("dispositions")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_program_ignores_stays_ignored(number):
    async def main():
        async with stream_world(1) as world:
            signal.signal(number, signal.SIG_IGN)
            consumer = world.consumer(app="billing", leases="memory://", until="tip")
            os.kill(os.getpid(), number)
            assert (await consumer.run(lambda _: os.kill(os.getpid(), number))).clean
            assert signal.getsignal(number) == signal.SIG_IGN

    run(main)


@pytest.mark.usefixtures("dispositions")
@pytest.mark.parametrize("number", SIGNALS)
def test_true_takes_a_signal_over_and_gives_it_back(number):
    seen = []

    def handler(*_):
        seen.append(number)

    async def main():
        async with stream_world(1) as world:
            signal.signal(number, handler)
            assert await _signal_and_stop(world, number, lambda: seen, handle_signals=True)
            assert seen == []
            os.kill(os.getpid(), number)
            await until(lambda: seen, "the program's own handler")

    run(main)


@pytest.mark.usefixtures("dispositions")
def test_true_takes_it_over_for_all_runs_that_may_have_it_and_false_for_none():
    seen = []

    async def main():
        async with stream_world(1) as world:
            kept = world.consumer(app="shipping", leases="memory://")
            (running,) = _run_all((kept,), handle_signals=False)
            await until(lambda: _has_joined(kept), "the first consumer")
            assert await _signal_and_stop(world, signal.SIGTERM, lambda: seen, handle_signals=True)
            assert not kept._consumer_run.is_stopping
            await kept.stop()
            await running

    run(main)


@pytest.mark.usefixtures("dispositions")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_puts_back_what_was_there_in_the_loop_too(number):
    async def main():
        async with stream_world(1) as world:
            before = signal.getsignal(number)
            assert (await world.consumer(app="billing", leases="memory://", until="tip").run(lambda record: None)).clean
            assert signal.getsignal(number) is before

    run(main)


@pytest.mark.usefixtures("dispositions")
def test_a_program_that_took_a_signal_during_a_run_may_put_ours_back_after_it():
    """As a server does that was started after the consumer and outlives it."""
    seen = []

    async def main():
        async with stream_world(1) as world:
            signal.signal(signal.SIGTERM, lambda *_: seen.append("before"))
            consumer = world.consumer(app="billing", leases="memory://")
            (running,) = _run_all((consumer,), handle_signals=True)
            await until(lambda: _has_joined(consumer), "the consumer")
            ours = signal.signal(signal.SIGTERM, lambda *_: seen.append("server"))
            await consumer.stop()
            await running
            signal.raise_signal(signal.SIGTERM)  # the server still has its own
            signal.signal(signal.SIGTERM, ours)
            signal.raise_signal(signal.SIGTERM)

    run(main)
    assert seen == ["server", "before"]


@pytest.mark.usefixtures("dispositions")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # it only ends
def test_a_fork_of_a_worker_ends_by_the_signal():
    async def main():
        async with stream_world(1) as world:
            consumer = world.consumer(app="billing", leases="memory://")
            (running,) = _run_all((consumer,))
            await until(lambda: _has_joined(consumer), "the consumer")
            if (child := os.fork()) == 0:
                signal.raise_signal(signal.SIGTERM)
                os._exit(1)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
            assert not consumer._consumer_run.is_stopping
            await consumer.stop()
            await running

    run(main)


def test_a_thread_runs_without_signals_and_says_so_if_it_is_asked_for_them():
    outcomes = []

    async def main():
        async with stream_world(1) as world:
            options = {"app": "billing", "leases": "memory://", "until": "tip"}
            outcomes.append(await world.consumer(**options).run(lambda record: None))
            with pytest.raises(UsageError, match="handle_signals=True works only in the main thread"):
                await world.consumer(**options).run(lambda record: None, handle_signals=True)

    thread = threading.Thread(target=run, args=(main,))
    thread.start()
    thread.join()
    assert outcomes[0].clean


@pytest.mark.parametrize("way", ["run", "run_batches"])
def test_another_value_is_refused(way):
    async def main():
        async with stream_world(1) as world:
            with pytest.raises(ConfigurationError, match="handle_signals is 'SIGTERM'; it must be True, False or None"):
                await getattr(world.consumer(), way)(lambda record: None, handle_signals="SIGTERM")

    run(main)


@pytest.mark.usefixtures("dispositions")
def test_a_run_that_a_signal_stops_returns_a_report_of_its_stopped_shard():
    async def main():
        async with stream_world(1) as world:
            world.put("a")
            happened = []
            consumer = world.consumer(
                app="billing", leases="memory://", on_event=happened.append, on_failure=Retry(attempts=1)
            )
            running = asyncio.create_task(consumer.run(_fail, handle_signals=True))
            await until(lambda: any(isinstance(event, events.ShardStopped) for event in happened), "the stopped shard")
            signal.raise_signal(signal.SIGTERM)
            report = await running
            assert not report.clean
            assert isinstance(report.stopped[0].error, LookupError)

    run(main)


async def _fail(record):
    raise LookupError("no such customer")

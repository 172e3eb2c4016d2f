"""`/live` says whether to restart, `/ready` whether it works (rule O2): of one process, and of several together."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from anabranch import ConsumerSettings, LeaseSettings, Producer, Retry, SyncProducer
from anabranch.errors import ConfigurationError
from anabranch.health import HealthApp
from anabranch.metrics import Prometheus
from anabranch.testing.doubles import run_local_kinesis
from patience import PATIENCE, wait_for

from services import free_port, moto_dynamodb
from stream_world import QUICK, StreamWorld, run, stream_world, until

LOCAL = ConsumerSettings(leases=QUICK.leases, polling=QUICK.polling, health_host="127.0.0.1")


def fetch(url, method="GET", seconds=10):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=seconds) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


async def ask(consumer, path):
    status, body = await asyncio.to_thread(fetch, f"{consumer.health_url}{path}")
    return status, json.loads(body) if path.endswith(("live", "ready", "json")) else body


async def until_ready(consumer, status=200):
    """Awaits this answer of `/ready`; returns the reasons."""
    while (found := await ask(consumer, "/ready"))[0] != status:  # noqa: ASYNC110 -- it has no event
        await asyncio.sleep(0.05)
    return found[1]["reasons"]


def health_consumer(world, **options):
    return world.consumer(**{"settings": LOCAL, "health_port": 0, "start": "trim_horizon", **options})


def test_a_running_consumer_is_live_and_ready_and_shows_itself():
    async def main():
        async with stream_world(2) as world:
            world.put(["a", "b", "c"])
            consumer, seen = health_consumer(world, app="billing", leases="memory://"), []
            assert consumer.health_url is None
            assert not consumer.health().ready
            running = asyncio.create_task(consumer.run(seen.append))
            await until(lambda: len(seen) == 3 and consumer.health_url is not None, "the records")
            assert await until_ready(consumer) == []
            assert await ask(consumer, "/live") == (200, {"live": True, "reasons": []})
            status, [shown] = await ask(consumer, "/status.json")
            assert (status, shown["kind"], shown["name"]) == (200, "Consumer", "billing")
            assert shown["health"]["ready"]
            assert shown["lag"] == max(shard["lag"] for shard in shown["status"]["shards"])
            assert len(shown["status"]["shards"]) == 2
            _, text = await ask(consumer, "/metrics")
            samples = [s for family in text_string_to_metric_families(text.decode()) for s in family.samples]
            assert [s.value for s in samples if s.name == "anabranch_records_processed_total"] == [3]
            assert len([s for s in samples if s.name == "anabranch_shard_records_processed_total"]) == 2
            assert (await ask(consumer, "/nothing"))[0] == 404
            assert (await asyncio.to_thread(fetch, f"{consumer.health_url}/live", "POST"))[0] == 405
            assert await asyncio.to_thread(fetch, f"{consumer.health_url}/live", "HEAD") == (200, b"")
            url = consumer.health_url
            await consumer.stop()
            await running
            assert consumer.health_url is None
            with pytest.raises(OSError, match="refused"):
                await asyncio.to_thread(fetch, f"{url}/live")

    run(main)


def test_metrics_include_the_programs_own_registry():
    async def main():
        registry = CollectorRegistry()
        Gauge("queue_depth", "Of the program.", registry=registry).set(7)
        exporters = [Prometheus(registry=registry)]
        async with stream_world(1) as world, health_consumer(world, metrics=exporters) as consumer:
            _, text = await ask(consumer, "/metrics")
            assert b"queue_depth 7.0" in text

    run(main)


def test_metrics_of_several_registries_have_each_series_once():
    async def main():
        async with stream_world(1) as world:
            registries = [CollectorRegistry(), CollectorRegistry()]
            for number, registry in enumerate(registries):
                Gauge("queue_depth", "Of the program.", registry=registry).set(7)
                Gauge(f"queue_{number}", "Of the program.", registry=registry).set(number)
            producers = [
                Producer("orders", aws=world.aws, metrics=[Prometheus(registry=registry)]) for registry in registries
            ]
            for producer in producers:
                await (await producer.put(b"1", "a"))
            text = HealthApp(*producers, Producer("orders", aws=world.aws)).answer("/metrics").body.decode()
            families = list(text_string_to_metric_families(text))
            names = [family.name for family in families]
            assert sorted(set(names)) == sorted(names)
            assert {"queue_depth", "queue_0", "queue_1"} < set(names)
            series = [(s.name, tuple(s.labels.items())) for family in families for s in family.samples]
            assert len(set(series)) == len(series)
            [put] = [family for family in families if family.name == "anabranch_user_records_put"]
            assert [sample.value for sample in put.samples] == [2.0]
            for producer in producers:
                await producer.close()

    run(main)


def test_an_unreachable_store_shows_in_ready_and_restarts_no_worker(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")

    async def main():
        with moto_dynamodb() as server:
            async with stream_world(1) as world:
                consumer = health_consumer(world, app="billing", leases=server.leases("health"))
                running = asyncio.create_task(consumer.run(lambda record: None))
                await until(lambda: consumer.health_url is not None, "the server")
                await until_ready(consumer)
                with server.stopped():
                    [reason] = await until_ready(consumer, 503)
                    assert "lease store" in reason
                    assert (await ask(consumer, "/live"))[0] == 200
                assert await until_ready(consumer) == []
                await consumer.stop()
                await running

    run(main)


def test_unreadable_and_stopped_shards_show_in_ready_and_restart_no_worker():
    async def main():
        async with stream_world(1) as world:
            consumer = health_consumer(world, on_failure=Retry(attempts=1))

            async def fail(record):
                raise LookupError("no such customer")

            running = asyncio.create_task(consumer.run(fail))
            await until(lambda: consumer.health_url is not None, "the server")
            await until_ready(consumer)
            fault = world.kinesis.faults.on("GetRecords").fail()
            [reason] = await until_ready(consumer, 503)
            assert reason.startswith("orders/shardId-000000000000: ")
            world.kinesis.faults.remove(fault)
            await until_ready(consumer)
            world.put("a")
            [reason] = await until_ready(consumer, 503)
            assert "no such customer" in reason
            assert (await ask(consumer, "/live"))[0] == 200
            await consumer.stop()
            await running

    run(main)


def test_a_blocked_event_loop_is_not_ready_and_one_that_stays_blocked_is_not_live(monkeypatch):
    """Asked from a thread, because the event loop of this test is the one that is blocked."""
    monkeypatch.setattr("anabranch._event_loops.READ_WAIT_SECONDS", 0.05)
    settings = ConsumerSettings(
        leases=LeaseSettings(expiry=3.0, stall_limit=3.0), polling=QUICK.polling, health_host="127.0.0.1"
    )
    answers, blocked = [], threading.Event()

    def watch(url):
        blocked.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and (not answers or answers[-1][1] != 503):
            answers.append((fetch(f"{url}/ready")[0], fetch(f"{url}/live")[0]))

    async def main():
        async with stream_world(1) as world:
            consumer = health_consumer(world, settings=settings)

            async def block(record):
                blocked.set()
                while answers[-1:] == [] or answers[-1][1] != 503:
                    time.sleep(0.05)  # noqa: ASYNC251 -- this is the mistake that is looked for

            running = asyncio.create_task(consumer.run(block))
            await until(lambda: consumer.health_url is not None, "the server")
            watcher = threading.Thread(target=watch, args=(consumer.health_url,))
            watcher.start()
            world.put("a")
            await until(lambda: not watcher.is_alive(), "the end of the blockade")
            watcher.join()
            running.cancel()
            await asyncio.wait([running])
        assert answers[0] == (503, 200)
        assert answers[-1] == (503, 503)

    run(main)


def test_live_does_not_wait_for_a_busy_event_loop_nor_for_pages_that_do(monkeypatch):
    """The loop is released only after the answer: nobody else has one by then."""
    monkeypatch.setattr("anabranch._event_loops.READ_WAIT_SECONDS", 60.0)
    blocked, released, answers = threading.Event(), threading.Event(), []

    def get(url):
        answers.append((url.rpartition("/")[2], fetch(url, seconds=60)[0]))

    def watch(url):
        try:
            blocked.wait(PATIENCE)
            waiting = [
                threading.Thread(target=get, args=(f"{url}/{page}",)) for page in ("ready", "metrics", "status.json")
            ]
            for thread in waiting:
                thread.start()
            get(f"{url}/live")
        finally:
            released.set()
        for thread in waiting:
            thread.join()

    async def main():
        async with stream_world(1) as world:
            consumer = health_consumer(world)

            async def block(record):
                blocked.set()
                released.wait(PATIENCE)

            running = asyncio.create_task(consumer.run(block))
            await until(lambda: consumer.health_url is not None, "the server")
            watching = asyncio.get_running_loop().run_in_executor(None, watch, consumer.health_url)
            world.put("a")  # the thread has begun: from now on the loop may be blocked
            await watching
            await consumer.stop()
            await running
        assert answers[0] == ("live", 200)
        assert sorted(answers[1:]) == [("metrics", 200), ("ready", 200), ("status.json", 200)]

    run(main)


def test_a_busy_event_loop_keeps_no_web_server_on_another_loop_from_answering():
    """`HealthApp` is mounted in a web server that runs in another thread."""
    blocked, released, answers = threading.Event(), threading.Event(), []

    async def answer(app, path):
        async def send(message):
            answers.extend([(path, message["status"])] if "status" in message else [])

        await app({"type": "http", "method": "GET", "path": path}, None, send)

    def serve(app):
        async def both():
            waiting = asyncio.create_task(answer(app, "/ready"))
            await asyncio.sleep(0)
            await answer(app, "/live")
            await waiting

        blocked.wait(PATIENCE)
        try:
            asyncio.run(both())
        finally:
            released.set()

    async def main():
        async with stream_world(1) as world:
            consumer = health_consumer(world)

            async def block(record):
                blocked.set()
                released.wait(PATIENCE)

            running = asyncio.create_task(consumer.run(block))
            serving = asyncio.get_running_loop().run_in_executor(None, serve, HealthApp(consumer))
            world.put("a")  # the thread has begun: from now on the loop may be blocked
            await serving
            await consumer.stop()
            await running
        assert answers == [("/live", 200), ("/ready", 503)]

    run(main)


def test_a_producer_whose_event_loop_is_busy_is_live_and_not_ready(monkeypatch):
    monkeypatch.setattr("anabranch._event_loops.READ_WAIT_SECONDS", 0.05)

    async def main():
        async with stream_world(1) as world, Producer("orders", aws=world.aws) as producer:
            await (await producer.put(b"1", "a"))
            app, answers = HealthApp(producer), []

            def look():
                answers.extend(app.answer(path) for path in ("/live", "/ready", "/status.json"))

            thread = threading.Thread(target=look)
            thread.start()
            thread.join()  # blocks the event loop
            live, ready, status = answers
            assert (live.status, ready.status, status.status) == (200, 503, 200)
            assert json.loads(ready.body)["reasons"] == ["the event loop did not answer within 0.05 s"]

    run(main)


def test_a_consumer_that_failed_after_its_start_is_not_live():
    async def main():
        async with stream_world(1) as world:
            consumer = health_consumer(world)
            running = asyncio.create_task(consumer.run(lambda record: None))
            await until(lambda: consumer.health().ready, "the start")
            consumer._consumer_run._on_callback_error(RuntimeError("a defect"))
            await asyncio.wait([running])
            report = consumer.health()
            assert (report.live, report.ready) == (False, False)
            assert "a defect" in report.reasons[0]
            assert running.exception() is not None

    run(main)


def test_a_producer_is_ready_until_its_requests_fail():
    async def main():
        async with stream_world(1) as world:
            producer = Producer("orders", aws=world.aws)
            assert producer.health().ready
            fault = world.kinesis.faults.on("PutRecords").fail()
            delivery = await producer.put(b"1", "a")
            await until(lambda: not producer.health().ready, "failing requests")
            assert producer.health().live
            assert "requests in a row failed" in producer.health().reasons[0]
            world.kinesis.faults.remove(fault)
            await delivery
            assert producer.health().ready
            await producer.close()
            assert producer.health().reasons == ("the producer is closed",)

    run(main)


def test_a_sync_producer_can_be_checked():
    async def main():
        async with stream_world(1) as world:

            def work():
                with SyncProducer("orders", aws=world.aws) as producer:
                    producer.put_and_wait(b"1", "a")
                    app = HealthApp(producer)
                    assert app.answer("/ready").status == 200
                    assert b"anabranch_user_records_put_total" in app.answer("/metrics").body
                assert app.answer("/ready").status == 503

            await asyncio.to_thread(work)

    run(main)


def test_metrics_of_a_sync_producer_include_the_registry_of_its_exporter():
    async def main():
        async with stream_world(1) as world:
            registry = CollectorRegistry()
            Gauge("queue_depth", "Of the program.", registry=registry).set(7)

            def work():
                with SyncProducer("orders", aws=world.aws, metrics=[Prometheus(registry=registry)]) as producer:
                    producer.put_and_wait(b"1", "a")
                    text = HealthApp(producer).answer("/metrics").body
                    assert b"queue_depth 7.0" in text
                    assert b'anabranch_user_records_put_total{app="",code="",shard_id="",stream="orders"' in text

            await asyncio.to_thread(work)

    run(main)


def test_a_sync_producer_that_was_closed_before_its_first_put_says_why_it_is_not_ready():
    producer = SyncProducer("orders")
    producer.close()
    assert producer.health().reasons == ("the producer is closed",)
    assert HealthApp(producer).answer("/ready").status == 503


def test_mistakes_are_named():
    with pytest.raises(ConfigurationError, match="HealthApp\\(\\) needs a consumer or a producer"):
        HealthApp()
    with pytest.raises(ConfigurationError, match="it must be a Consumer, Producer or SyncProducer"):
        HealthApp("orders")

    async def main():
        async with stream_world(1) as world:
            with pytest.raises(ConfigurationError, match="health_port is 70000; it must be from 1 to 65535"):
                world.consumer(health_port=70000)
            with pytest.raises(ConfigurationError, match="health_port is '8080'; it must be a whole number or None"):
                world.consumer(health_port="8080")
            async with health_consumer(world) as first:
                port = int(first.health_url.rpartition(":")[2])
                with pytest.raises(ConfigurationError, match=f"port {port} on 127.0.0.1 is in use"):
                    await health_consumer(world, health_port=port).run(lambda record: None)

    run(main)


def test_without_the_library_metrics_say_what_to_install():
    program = """
import sys
sys.modules["prometheus_client"] = None
from anabranch import Producer
from anabranch.health import HealthApp
answer = HealthApp(Producer("orders")).answer("/metrics")
print(answer.status, answer.body.decode())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout == "501 /metrics needs a library: pip install 'anabranch[prometheus]'\n\n"


# the command line


MODULE = """
import os
import time
import anabranch
from anabranch import ConsumerSettings, LeaseSettings, PollingSettings

SETTINGS = ConsumerSettings(
    leases=LeaseSettings(expiry=3.0), polling=PollingSettings(idle_interval=0.2), health_host="127.0.0.1"
)
consumer = anabranch.Consumer("orders", app="billing", settings=SETTINGS, health_port=1)

@consumer.handler
async def handle(record):
    print(os.getpid(), flush=True)
    while record.data == b"block" and not os.path.exists("go"):
        time.sleep(0.05)
"""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_command_line_serves_the_health_of_all_workers(workers, tmp_path):
    (tmp_path / "app.py").write_text(MODULE)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with run_local_kinesis(create={"orders": 2}) as kinesis:
        environment = {**os.environ, **kinesis.environment(), "XDG_STATE_HOME": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-m", "anabranch", "run", "app:consumer", "--workers", str(workers), "--log", "warning",
             "--health-port", str(port)],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            wait_for_status(f"{url}/ready", 200)
            assert fetch(f"{url}/live")[0] == 200
            assert fetch(f"{url}/live", "POST")[0] == 405
            families = list(text_string_to_metric_families(fetch(f"{url}/metrics")[1].decode()))
            [held] = [family for family in families if family.name == "anabranch_leases_held"]
            assert len({family.name for family in families}) == len(families)
            document = json.loads(fetch(f"{url}/status.json")[1])
            if workers == 1:
                assert [sample.value for sample in held.samples] == [2]
                assert document[0]["name"] == "billing"
            else:
                assert {sample.labels["worker"] for sample in held.samples} == {"0", "1"}
                assert {shown[0]["name"] for shown in document["workers"].values()} == {"billing"}
                check_that_busy_workers_are_live(kinesis, tmp_path, url)
                check_that_a_dead_worker_shows(process, url)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE)
            assert "Traceback" not in errors
        finally:
            process.kill()
            process.communicate()


def check_that_busy_workers_are_live(kinesis, folder, url):
    """Also while other pages, which wait for the event loops, are asked for without a pause."""
    with SyncProducer("orders", aws=StreamWorld(kinesis, "orders").aws) as producer:
        producer.put_many((str(number), b"block") for number in range(20))  # keys of both shards
    wait_for_status(f"{url}/ready", 503)
    over = threading.Event()

    def keep_asking(page):
        while not over.is_set():
            fetch(f"{url}/{page}")

    askers = [threading.Thread(target=keep_asking, args=(page,)) for page in 2 * ("ready", "metrics", "status.json")]
    try:
        for asker in askers:
            asker.start()
        answers = {fetch(f"{url}/live") for _ in range(20)}
        assert fetch(f"{url}/ready")[0] == 503, "they are busy"
    finally:
        over.set()
        (folder / "go").touch()
    for asker in askers:
        asker.join()
    assert answers == {(200, b'{"live":true,"workers":{}}')}
    wait_for_status(f"{url}/ready", 200)


def check_that_a_dead_worker_shows(process, url):
    line = process.stderr.readline()
    victim = int(line.rpartition("processes ")[2].split(",")[0])
    os.kill(victim, signal.SIGKILL)
    wait_for_status(f"{url}/ready", 503)
    wait_for(lambda: json.loads(fetch(f"{url}/ready")[1])["workers"] == {"0": ["it has ended"]}, "its end")
    assert fetch(f"{url}/live")[0] == 200
    assert json.loads(fetch(f"{url}/status.json")[1])["workers"]["0"] == {"error": "it has ended"}


def wait_for_status(url, status):
    def look():
        with suppress(OSError):
            return fetch(url)[0] == status

    wait_for(look, f"{status} of {url}")

"""The model-serving example works as its README says: the model, the ingress, the gateway, and the whole system."""

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

import anabranch
from anabranch.local import LocalKinesis

EXAMPLE = Path(__file__).parents[2] / "examples" / "model_serving"
HAND = {"session_id": "s-1", "number": 7, "landmarks": [[0.1 * at, 0.2, 0.3] for at in range(21)], "sent_at": 1.5}
METRICS = (
    "ActiveShards, ConsumerLag, ErrorRate, MillisBehindLatest, PredictionConfidence, "
    "ProcessingLatency, RecordsProcessed"
)

pytestmark = pytest.mark.long


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the example, or one that it needs."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


async def records_of(stream: str, count: int) -> list[bytes]:
    async with anabranch.Consumer(stream, app="reader", leases="memory://", idle_timeout=10) as consumer:
        found = []
        async for record in consumer:
            found.append(record.data)
            if len(found) == count:
                return found
    return found


def test_the_committed_model_knows_hands_that_it_was_not_trained_on(example):
    train = example("train")
    assert train.FILE.stat().st_size < 300_000
    assert train.accuracy(train.LetterModel(), 50, seed=3) > 0.97


def test_the_model_names_what_is_wrong_with_a_hand(example):
    model = example("model").LetterModel()
    with pytest.raises(ValueError, match="a hand has 21 points"):
        model.predict([[[0.0, 0.0, 0.0]] * 20])
    with pytest.raises(ValueError, match="not finite numbers, or all in one place"):
        model.predict([[[0.0, 0.0, 0.0]] * 21])


@pytest.mark.parametrize(
    "wrong",
    [
        {"landmarks": HAND["landmarks"][:-1]},
        {"landmarks": [*HAND["landmarks"][:-1], [0.1, 0.2]]},
        {"landmarks": [[1e39, 0.0, 0.0], *HAND["landmarks"][1:]]},
        {"landmarks": [[0.1, 0.2, 0.3]] * 21},
        {"session_id": ""},
        {"session_id": "s" * 257},
        {"number": 1 << 70},
    ],
    ids=["points", "coordinates", "size", "place", "no session", "session", "number"],
)
def test_the_ingress_refuses_what_the_model_or_the_stream_cannot_take(example, wrong):
    event = {"requestContext": {"connectionId": "c-1"}, "body": json.dumps({**HAND, **wrong})}
    answer = example("ingress").lambda_handler(event, None)
    assert (answer["statusCode"], "not a hand" in answer["body"]) == (400, True)


def test_a_failure_is_simulated_only_where_that_is_wanted(example, monkeypatch):
    landmarks_from = example("ingress").landmarks_from
    body = json.dumps({**HAND, "session_id": "s" * 256, "simulate": "timeout"})
    assert landmarks_from(body, "c-1").simulate is None
    monkeypatch.setenv("ASL_SIMULATE", "1")
    assert landmarks_from(body, "c-1").simulate == "timeout"


def test_the_ingress_lambda_answers_after_the_hand_is_in_the_stream(example, monkeypatch):
    ingress = example("ingress")

    async def main() -> None:
        async with LocalKinesis(create={"asl-landmarks-stream": 1}) as kinesis:
            for name, value in kinesis.environment().items():
                monkeypatch.setenv(name, value)
            event = {"requestContext": {"connectionId": "c-1"}, "body": json.dumps(HAND)}
            assert await asyncio.to_thread(ingress.lambda_handler, event, None) == {"statusCode": 200}
            refused = await asyncio.to_thread(ingress.lambda_handler, {**event, "body": "[]"}, None)
            assert (refused["statusCode"], "not a hand" in refused["body"]) == (400, True)
            (data,) = await records_of("asl-landmarks-stream", 1)
            assert json.loads(data) == {**HAND, "connection_id": "c-1", "simulate": None}
            await asyncio.to_thread(ingress._producer().close)

    asyncio.run(main())


def test_the_gateway_answers_to_botocore_as_the_management_api(example, monkeypatch):
    gateway, aiohttp = example("gateway"), example("aiohttp")
    test_utils = example("aiohttp.test_utils")

    async def main() -> None:
        async with LocalKinesis(create={"asl-landmarks-stream": 1}) as kinesis:
            for name, value in kinesis.environment().items():
                monkeypatch.setenv(name, value)
            server = test_utils.TestServer(gateway.Gateway().app())
            async with test_utils.TestClient(server) as client:
                api = boto3.client("apigatewaymanagementapi", endpoint_url=str(server.make_url("/")).rstrip("/"))
                async with client.ws_connect("/ws") as socket:
                    for wrong in ({"landmarks": "none"}, {"session_id": "s" * 300}):
                        await socket.send_json({**HAND, **wrong})
                        assert "not a hand" in (await socket.receive_json())["error"]
                    await socket.send_json(HAND)
                    (data,) = await records_of("asl-landmarks-stream", 1)
                    connection_id = json.loads(data)["connection_id"]
                    await asyncio.to_thread(api.post_to_connection, ConnectionId=connection_id, Data=b'["A"]')
                    assert await socket.receive_json() == ["A"]
                    with pytest.raises(api.exceptions.ClientError, match="400"):
                        await asyncio.to_thread(api.post_to_connection, ConnectionId=connection_id, Data=b"\xff")
                    await asyncio.to_thread(api.get_connection, ConnectionId=connection_id)
                    await asyncio.to_thread(api.delete_connection, ConnectionId=connection_id)
                    assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
                with pytest.raises(api.exceptions.GoneException):
                    await asyncio.to_thread(api.post_to_connection, ConnectionId="nobody", Data=b"{}")

    asyncio.run(main())


def test_the_readme_has_the_cost_table_of_the_recorded_counts(example):
    cost = example("cost")
    assert cost.table(cost.COUNTED) in (EXAMPLE / "README.md").read_text()


def test_a_program_that_the_run_killed_is_not_taken_for_one_that_ended_by_itself(example, monkeypatch, tmp_path):
    stage = example("stage")
    monkeypatch.setattr(stage, "PROGRAMS", {"service": ["sleep", "60"], "short": ["sh", "-c", "exit 3"]})

    async def watch(programs) -> None:
        while True:  # in every turn of the event loop
            programs.check()
            await asyncio.sleep(0)

    async def interrupt(call) -> None:
        """As the end of a run does."""
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    async def main() -> None:
        programs = stage.Stage(tmp_path)
        watching = asyncio.create_task(watch(programs))
        await programs.start("service")
        for _ in range(5):
            await programs.kill("service")
            await programs.start("service")
        await interrupt(programs.kill("service"))
        await interrupt(programs.start("service"))
        assert programs.killed == ["service"]
        await programs.start("service")
        assert not watching.done()
        await programs.start("short")
        with pytest.raises(RuntimeError, match="short ended with 3"):
            await watching
        await programs.stop()

    asyncio.run(main())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [(), ("--chaos", "1")], ids=["with trouble", "with random kills"])
def test_every_hand_has_a_letter_or_is_in_the_dead_letters(example, options):
    example("aiohttp")
    command = [sys.executable, str(EXAMPLE / "run.py"), "--seconds", "8", "--rate", "100", *options]
    environment = {**os.environ, "OTEL_TRACES_SAMPLER_ARG": "0.1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "out of order" in done.stdout
    assert number_in(r"(\d+) traces cover the whole way", done.stdout) > 0
    assert f"among them: {METRICS}\n" in done.stdout
    assert number_in(r"(\d+) predictions in the logs; average confidence by prediction: A [01]\.\d", done.stdout) > 0
    assert number_in(r"in the review queue, after three more attempts\W+(\d+)", done.stdout) > 0
    for program in ("service", "processor", "outbound") if "--chaos" in options else ():
        assert number_in(rf"killed: .*{program} (\d+) times", done.stdout) > 0


def number_in(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])

"""The samples of the page on web frameworks, in a real uvicorn: they put, handle, show their health and end cleanly."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from anabranch import Application
from anabranch.testing.doubles import run_local_kinesis
from patience import PATIENCE, wait_for

from services import free_port

PAGE = Path(__file__).parents[2] / "docs" / "web-frameworks.md"
SAMPLES = dict(re.findall(r"```python\n# file: (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL))


def get(url, data=None):
    """Status and body; None while nobody listens."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=PATIENCE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return None


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_serves_until_uvicorn_gets_sigterm_and_ends_cleanly(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text(SAMPLES[name])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    port = free_port()
    with run_local_kinesis(create={"orders": 1}) as kinesis:
        for key, value in kinesis.environment().items():
            monkeypatch.setenv(key, value)
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", f"{name}:app", "--port", str(port), "--log-level", "warning"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: (get(f"{url}/health/ready") or [0])[0] == 200, "the start")
            assert json.loads(get(f"{url}/health/ready")[1]) == {"ready": True, "reasons": []}
            assert get(f"{url}/health/live")[0] == 200
            status, body = get(f"{url}/orders/user-1", b"a coat")
            assert status == 200
            assert json.loads(body)["sequence_number"].isdigit()
            assert server.stdout.readline() == "handled user-1\n"
            consumer, producer = json.loads(get(f"{url}/health/status.json")[1])
            assert (consumer["kind"], consumer["name"]) == ("Consumer", "billing")
            assert consumer["status"]["shards"][0]["shard_id"] == "shardId-000000000000"
            assert producer["status"]["streams"][0]["counters"]["delivered_count"] == 1
            families = {
                family.name for family in text_string_to_metric_families(get(f"{url}/health/metrics")[1].decode())
            }
            assert {"anabranch_records_processed", "anabranch_user_records_put"} <= families
            assert get(f"{url}/health/nothing")[0] == 404
            server.send_signal(signal.SIGTERM)
            output, _ = server.communicate(timeout=PATIENCE)
        finally:
            server.kill()
            server.wait()
        assert server.returncode in {0, -signal.SIGTERM}, output
        assert "Traceback" not in output
        [member], [shard] = asyncio.run(left_behind())
        assert member.state == "left"  # which frees its leases
        assert shard.records_handled == 1


async def left_behind():
    async with Application("billing") as application:
        status = await application.status()
        return status.members, status.shards

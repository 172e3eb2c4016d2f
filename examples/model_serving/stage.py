"""The servers and processes of the system on this machine: started, watched, killed, and stopped by process id."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from botocore.session import Session
from messages import FAILED_QUEUE, LANDMARKS_STREAM, LETTERS_STREAM, REVIEW_QUEUE

import anabranch

HERE = Path(__file__).parent
MOTO = HERE.parents[1] / "tests" / "moto_server.py"
CHECKPOINTS = "dynamodb://asl-kinesis-checkpoints"
ANABRANCH = [sys.executable, "-m", "anabranch"]
PROGRAMS = {
    "gateway": [sys.executable, "gateway.py", "--port", "{gateway_port}"],
    "service-1": [*ANABRANCH, "run", "service:consumer", "--log-format", "json"],
    "service-2": [*ANABRANCH, "run", "service:consumer", "--log-format", "json"],
    "outbound": [sys.executable, "outbound.py"],
    "processor": [*ANABRANCH, "dlq", "worker", "service:consumer", f"sqs://{FAILED_QUEUE}"],
}


class Stage:
    """Kinesis, DynamoDB and SQS on free ports, and the five programs of the system."""

    def __init__(self, folder: Path, *, shards: int = 4) -> None:
        self._folder = folder
        self._shards = shards
        self._programs: dict[str, asyncio.subprocess.Process] = {}
        self._kinesis_port, self._moto_port, self._gateway_port = free_ports(3)
        moto = f"http://127.0.0.1:{self._moto_port}"
        self.gateway_url = f"http://127.0.0.1:{self._gateway_port}"
        self.environment = {
            **os.environ,
            "AWS_ENDPOINT_URL_KINESIS": f"http://127.0.0.1:{self._kinesis_port}",
            "AWS_ENDPOINT_URL_DYNAMODB": os.environ.get("AWS_ENDPOINT_URL_DYNAMODB", moto),
            "AWS_ENDPOINT_URL_SQS": moto,
            "AWS_ENDPOINT_URL_CLOUDWATCH": moto,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "ANABRANCH_LEASES": CHECKPOINTS,
            "GATEWAY_URL": self.gateway_url,
            "ASL_METRICS_SECONDS": "5",
            "ASL_TRACES": str(folder),
            "ASL_SIMULATE": "1",
        }
        self._killed: set[str] = set()

    async def start_servers(self) -> None:
        streams = [f"--create={name}:{self._shards}" for name in (LANDMARKS_STREAM, LETTERS_STREAM)]
        await self._spawn("kinesis", [*ANABRANCH, "serve", "--port", str(self._kinesis_port), *streams])
        await self._spawn("aws", [sys.executable, str(MOTO), str(self._moto_port)])
        await asyncio.gather(*(self._wait_for_port(port) for port in (self._kinesis_port, self._moto_port)))
        await asyncio.to_thread(self._create_queues)

    def _create_queues(self) -> None:
        sqs = self.client("sqs")
        keep = {"MessageRetentionPeriod": str(14 * 86_400)}
        for queue in (FAILED_QUEUE, REVIEW_QUEUE):
            sqs.create_queue(QueueName=queue, Attributes=keep)

    def client(self, service: str):  # noqa: ANN201 -- botocore has no types
        return Session().create_client(
            service,
            region_name="us-east-1",
            endpoint_url=self.environment[f"AWS_ENDPOINT_URL_{service.upper()}"],
            aws_access_key_id="local",
            aws_secret_access_key="local",  # noqa: S106 -- of local servers
        )

    async def start(self, name: str) -> None:
        command = [part.format(gateway_port=self._gateway_port) for part in PROGRAMS[name]]
        extra = {"ASL_REDRIVE": "1"} if name == "processor" else {}
        await self._spawn(name, command, extra)
        if name == "gateway":
            await self._wait_for_port(self._gateway_port)

    async def _wait_for_port(self, port: int) -> None:
        async with asyncio.timeout(60):
            while True:
                self.check()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    return

    async def _spawn(self, name: str, command: list[str], extra: Mapping[str, str] | None = None) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._programs[name] = await asyncio.create_subprocess_exec(
                *command, cwd=HERE, env={**self.environment, **(extra or {})}, stdout=log, stderr=log
            )
        # Only now: until here `check` finds the program that was killed.
        self._killed.discard(name)

    async def kill(self, name: str) -> None:
        """SIGKILL: the program writes no checkpoint and releases no lease."""
        self.check()
        self._killed.add(name)
        program = self._programs[name]
        program.kill()
        await program.wait()

    def split_first_shard(self) -> str:
        kinesis = self.client("kinesis")
        shard = kinesis.list_shards(StreamName=LANDMARKS_STREAM)["Shards"][0]
        keys = shard["HashKeyRange"]
        middle = (int(keys["StartingHashKey"]) + int(keys["EndingHashKey"])) // 2
        kinesis.split_shard(StreamName=LANDMARKS_STREAM, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))
        return shard["ShardId"]

    @property
    def killed(self) -> list[str]:
        return sorted(self._killed)

    def check(self) -> None:
        """Raises if a program ended by itself."""
        for name, program in self._programs.items():
            if program.returncode is not None and name not in self._killed:
                log = (self._folder / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} ended with {program.returncode}:\n{log[-3000:]}")

    async def wait_until_owned(self) -> None:
        """Until every shard of both streams has an owner."""
        for app in ("letter-model", "letters-outbound"):
            application = anabranch.Application(app)
            try:
                async with asyncio.timeout(60):
                    while not await self._is_owned(application):  # noqa: ASYNC110 -- other processes take them
                        await asyncio.sleep(0.2)
            finally:
                await application.close()

    async def _is_owned(self, application: anabranch.Application) -> bool:
        self.check()
        try:
            shards = (await application.status()).shards
        except anabranch.AnabranchError:  # its first worker has not opened it yet
            return False
        return bool(shards) and all(shard.worker_id for shard in shards)

    async def stop_programs(self) -> None:
        """Stops the programs gracefully; the servers stay."""
        await self._stop([name for name in self._programs if name in PROGRAMS])

    async def stop(self) -> None:
        await self.stop_programs()
        await self._stop(list(self._programs))

    async def _stop(self, names: list[str]) -> None:
        """With SIGTERM; what does not end within 30 seconds is killed."""
        self._killed.update(names)
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                self._programs[name].send_signal(signal.SIGTERM)
        for name in names:
            try:
                async with asyncio.timeout(30):
                    await self._programs[name].wait()
            except TimeoutError:
                self._programs[name].kill()
                await self._programs[name].wait()


@contextlib.asynccontextmanager
async def running_stage(folder: Path, *, shards: int = 4) -> AsyncIterator[Stage]:
    stage = Stage(folder, shards=shards)
    try:
        await stage.start_servers()
        for name in PROGRAMS:
            await stage.start(name)
        yield stage
    finally:
        await stage.stop()


def free_ports(count: int) -> list[int]:
    """Below the ports that the kernel gives to clients: one of those could be taken before the server has started."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")

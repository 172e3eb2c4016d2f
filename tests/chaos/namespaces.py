"""Two workers on two "machines": network namespaces with addresses of their own. One of them is cut off for 30 s.

    sudo env PYTHONPATH=tests python tests/chaos/namespaces.py

A namespace is connected by a pair of virtual devices. Taking the device down drops every packet without an answer, as a
pulled cable does. Needs root and iproute2.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from traffic import Traffic, spread_keys
from worker_fleet import Fleet
from worker_process import WorkerOptions

from anabranch.testing import AuditReport
from network_proxy import NetworkProxy

from services import dynamodb_local
from stream_world import stream_world

CUT_SECONDS = 30.0
SHARDS = 4


class Machine:
    """A network namespace with one address, and the host's address that it sees."""

    def __init__(self, number: int) -> None:
        self.name = f"anabranch-{os.getpid()}-{number}"
        self.host_device, self._device = f"abh{os.getpid() % 10_000}x{number}", f"abn{os.getpid() % 10_000}x{number}"
        network = f"10.{200 + number}.{os.getpid() % 250}"
        self.host_address, self.address = f"{network}.1", f"{network}.2"

    @property
    def within(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def create(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self.host_device, "type", "veth", "peer", "name", self._device, "netns", self.name)
        _ip("address", "add", f"{self.host_address}/30", "dev", self.host_device)
        _ip("link", "set", self.host_device, "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/30", "dev", self._device)
        _ip("-n", self.name, "link", "set", self._device, "up")

    def cut_off(self) -> None:
        _ip("link", "set", self.host_device, "down")

    def connect(self) -> None:
        _ip("link", "set", self.host_device, "up")

    def delete(self) -> None:
        subprocess.run(["ip", "link", "delete", self.host_device], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def why_not() -> str | None:
    """Why namespaces cannot be used here; None if they can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed: run `make services`"
    machine = Machine(0)
    try:
        machine.create()
    except RuntimeError as error:
        return f"network namespaces are not allowed here ({error})"
    finally:
        machine.delete()
    return None


class CutOff(NamedTuple):
    report: AuditReport
    taken_seconds: float
    """From the cut until the other machine had handled records of all shards."""
    returned_seconds: float
    """From the reconnection until the machine that was cut off handled records again."""
    late_starts: int
    """Handler calls that the cut-off worker started after its fence time and before the reconnection."""


@asynccontextmanager
async def machines(count: int) -> AsyncIterator[list[Machine]]:
    found = [Machine(number) for number in range(1, count + 1)]
    try:
        for machine in found:
            machine.create()
        yield found
    finally:
        for machine in found:
            machine.delete()


async def run_cut_off(folder: str) -> CutOff:
    with dynamodb_local(Path(folder, "dynamodb")) as store:
        options = WorkerOptions(
            stream="orders", app="billing", folder=folder, order="key", concurrency=16, leases=store.leases()
        )
        async with (
            machines(2) as both,
            stream_world(shards=SHARDS) as world,
            Fleet(options, world.kinesis.environment()) as fleet,
        ):
            traffic = Traffic(world, spread_keys(SHARDS, 2), fleet.auditor, aggregate=False)
            writing = asyncio.create_task(traffic.steadily(0.25))
            proxies, workers = [], []
            for machine in both:
                kinesis = await NetworkProxy(
                    int(world.kinesis.endpoint_url.rpartition(":")[2]), machine.host_address
                ).start()
                leases = await NetworkProxy(store.port, machine.host_address).start()
                proxies += [kinesis, leases]
                (worker,) = await fleet.start(
                    within=machine.within,
                    environment={"AWS_ENDPOINT_URL_KINESIS": f"http://{machine.host_address}:{kinesis.port}"},
                    leases=f"dynamodb://?endpoint=http://{machine.host_address}:{leases.port}&region=eu-west-1",
                )
                await fleet.event("ConsumerStarted", worker)
                workers.append(worker)
            found = await _cut_off(fleet, both[0], workers)
            writing.cancel()
            await traffic.close()
            await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "everything handled")
            for worker in workers:
                await worker.terminate()
            await fleet.look_at_commits()
            for proxy in proxies:
                await proxy.close()
            return found._replace(report=fleet.auditor.report())


async def _cut_off(fleet: Fleet, machine: Machine, workers) -> CutOff:
    def shards(worker, since: float) -> set[str]:
        return {
            effect.record.shard_id
            for effect in fleet.effects
            if effect.process_id == worker.id and effect.kind == "start" and effect.at_ns / 1e9 > since
        }

    victim, other = workers
    for worker in workers:
        await fleet.until(lambda worker=worker: len(shards(worker, 0)) >= SHARDS // 2, f"{worker.name} works")
    began = time.monotonic()
    machine.cut_off()
    await fleet.until(lambda: len(shards(other, began)) == SHARDS, "the other machine has all shards")
    taken = time.monotonic() - began
    await asyncio.sleep(max(0.0, began + CUT_SECONDS - time.monotonic()))
    fleet.look()
    fenced = [at for at in _starts(fleet, victim) if at > began + fleet.options.expiry]
    connected = time.monotonic()
    machine.connect()
    await fleet.until(lambda: bool(shards(victim, connected)), "the machine that was cut off works again", 90)
    return CutOff(fleet.auditor.report(), taken, time.monotonic() - connected, len(fenced))


def _starts(fleet: Fleet, worker) -> list[float]:
    return [effect.at_ns / 1e9 for effect in fleet.effects if effect.process_id == worker.id and effect.kind == "start"]


def describe(found: CutOff) -> str:
    return (
        f"two machines, one cut off for {CUT_SECONDS:.0f} s: {found.report}\n  the other machine had all shards after "
        f"{found.taken_seconds:.1f} s; the first one worked again {found.returned_seconds:.1f} s after its "
        f"reconnection; it started {found.late_starts} calls while it was cut off and fenced"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run_cut_off(folder))
    print(describe(found))
    assert found.report.ok


if __name__ == "__main__":
    main()

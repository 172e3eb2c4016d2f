"""The whole system on this machine, with a live view, a killed worker, a split shard, and an audit at the end.

    python run.py                        # 25 s, two service workers, with faults
    python run.py --rate 1000 --calm     # a load test: no faults, no broken hands
    python run.py --shards 1 --rate 500 --calm

The audit: every hand has an answer or is in the dead letters; what each client accepted is complete and in order.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tracing
from clients import Clients, Session
from messages import REVIEW_QUEUE, Landmarks
from rich.console import Console
from rich.live import Live
from rich.table import Table
from stage import Stage, running_stage

import anabranch
from anabranch.errors import LeaseStoreError

DRAIN_SECONDS = 120.0
"""A killed processor leaves the letters that it held hidden in SQS for 60 s."""
SILENT_SECONDS = 4.0
"""A heartbeat is due every 2.5 s."""
METRICS = {
    "RecordsProcessed",
    "ProcessingLatency",
    "PredictionConfidence",
    "ErrorRate",
    "MillisBehindLatest",
    "ConsumerLag",
    "ActiveShards",
}
QUERIED = {"time", "session_id", "prediction", "confidence", "processing_time_ms"}
KILLED_AT_RANDOM = ("service-1", "processor", "outbound", "service-2")
"""The clients send until each of the first three was killed."""


@dataclass
class View:
    """What the terminal shows, once a second."""

    clients: Clients
    status: anabranch.FleetStatus | None = None
    story: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    updated: float = field(default_factory=time.monotonic)
    rates: tuple[float, float] = (0.0, 0.0)
    seen: tuple[int, int] = (0, 0)

    def tell(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self.began:5.1f} s  {text}")

    def update(self) -> None:
        now = (self.clients.sent_count, self.clients.answered_count)
        seconds, self.updated = time.monotonic() - self.updated, time.monotonic()
        self.rates = ((now[0] - self.seen[0]) / seconds, (now[1] - self.seen[1]) / seconds)
        self.seen = now

    def facts(self) -> Iterator[tuple[str, str]]:
        p50, p99 = latency(self.clients.sessions, last=200)
        yield "hands sent", f"{self.seen[0]:,}   {self.rates[0]:,.0f}/s"
        yield "letters received", f"{self.seen[1]:,}   {self.rates[1]:,.0f}/s"
        yield "without a letter so far", f"{self.seen[0] - self.seen[1]:,}"
        yield "client to letter", f"p50 {p50:,.0f} ms   p99 {p99:,.0f} ms"
        if self.status is not None:
            unread = [shard for shard in self.status.shards if shard.state != "finished"]
            owners = {shard.worker_id for shard in unread if shard.worker_id}
            yield "lag", shown_lag(self.status)
            yield "workers", f"{len(self.status.live_members)} alive, {len(owners)} with shards, {len(unread)} shards"

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, value in self.facts():
            table.add_row(f"[bold]{name}", value)
        for line in self.story[-8:]:
            table.add_row("", f"[dim]{line}")
        return table


def shown_lag(status: anabranch.FleetStatus) -> str:
    """As workers report it. No worker reports the shards of a killed one: they wait since its last heartbeat."""
    silent = {one.member_id: one.heartbeat_age for one in status.members if one.heartbeat_age > SILENT_SECONDS}
    waits = [max(silent[one.owner], one.lag or 0.0) for one in status.unfinished_shards if one.owner in silent]
    if waits:
        return f"at least {max(waits):.1f} s; shards that wait for a new worker: {len(waits)}"
    return "unknown" if status.lag is None else f"{status.lag:.1f} s"


def latency(sessions: list[Session], last: int | None = None) -> tuple[float, float]:
    values = sorted(value for one in sessions for value in (one.latencies_ms[-last:] if last else one.latencies_ms))
    return (values[len(values) // 2], values[int(len(values) * 0.99)]) if values else (0.0, 0.0)


async def watch(stage: Stage, view: View, live: Live | None) -> None:
    """Updates the view; on anything but a terminal it prints a line every five seconds."""
    async with anabranch.Application("letter-model") as application:
        for number in itertools.count(1):
            await asyncio.sleep(1.0)
            stage.check()
            view.update()
            with contextlib.suppress(LeaseStoreError):  # the store did not answer: the view keeps what it has
                view.status = await application.status()
            if live is not None:
                live.update(view, refresh=True)
            elif number % 5 == 0:
                print("   ".join(f"{name}: {value}" for name, value in view.facts()), flush=True)


async def trouble(stage: Stage, view: View, seconds: float) -> None:
    """Kills a worker and splits a shard while hands arrive."""
    await asyncio.sleep(seconds * 0.3)
    await stage.kill("service-1")
    view.tell("killed service-1 (SIGKILL); service-2 takes over its shards")
    await asyncio.sleep(seconds * 0.2)
    shard = await asyncio.to_thread(stage.split_first_shard)
    view.tell(f"split {shard}; its children start when its last record is finished")
    await stage.start("service-1")
    view.tell("started service-1 again; it gets its share of the shards")


async def chaos(stage: Stage, view: View, seed: int, seconds: float) -> None:
    """Kills a random program every few seconds, and starts it again."""
    chance = random.Random(seed)  # noqa: S311 -- no secrets
    longest = min(5.0, seconds / 6)
    first = chance.sample(KILLED_AT_RANDOM[:3], 3)
    while True:
        await asyncio.sleep(chance.uniform(0.2, 1.0) * longest)
        name = first.pop() if first else chance.choice(KILLED_AT_RANDOM)
        await stage.kill(name)
        view.kills[name.partition("-")[0]] += 1
        await asyncio.sleep(chance.uniform(0.0, 0.4) * longest)
        await stage.start(name)
        view.tell(f"killed {name} (SIGKILL) and started it again")


async def in_dead_letters() -> set[tuple[str, int]]:
    """Session and number of the hands in the review queue."""
    hands: set[tuple[str, int]] = set()
    async with anabranch.DeadLetters(f"sqs://{REVIEW_QUEUE}") as review:
        async for letter in review.letters():
            hand = msgspec.json.decode(letter.payload, type=Landmarks)
            hands.add((hand.session_id, hand.number))
    return hands


async def settle(clients: Clients, deadline: float) -> set[tuple[str, int]]:
    """Waits until every hand has an answer or is in the review queue. Returns those in the queue."""
    dead: set[tuple[str, int]] = set()
    while True:
        missing = {(one.session_id, number) for one in clients.sessions for number in one.unanswered}
        if missing - dead:
            dead |= await in_dead_letters()
        if not missing - dead or time.monotonic() > deadline:
            return dead
        await asyncio.sleep(0.5)


def audit(clients: Clients, dead: set[tuple[str, int]], console: Console) -> bool:
    sessions = clients.sessions
    missing = {(one.session_id, number) for one in sessions for number in one.unanswered} - dead
    both = {(one.session_id, number) for one in sessions for number in one.answered} & dead
    disorder = sum(len(one.disorder) for one in sessions)
    unknown = sum(len(one.answered.keys() - one.sent.keys()) for one in sessions)
    right = sum(one.right_count for one in sessions)
    p50, p99 = latency(sessions)
    rows = [
        ("hands sent", clients.sent_count, None),
        ("letters received", clients.answered_count, None),
        ("  of them redriven from the dead letters", sum(len(one.redriven) for one in sessions), None),
        ("in the review queue, after three more attempts", len(dead), None),
        ("repeats that the clients dropped", sum(one.repeat_count for one in sessions), None),
        ("without an answer and not in the dead letters", len(missing), 0),
        ("answered and also in the review queue", len(both), 0),
        ("out of order", disorder, 0),
        ("never sent", unknown, 0),
        ("refused by the gateway", len(clients.errors), 0),
    ]
    table = Table(title="Audit", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    for name, count, expected in rows:
        mark = "" if expected is None else " [green]ok" if count == expected else " [red]WRONG"
        table.add_row(name, f"{count:,}{mark}")
    console.print(table)
    console.print(f"predicted right: {right / max(1, clients.answered_count):.1%}")
    console.print(f"client to letter: p50 {p50:,.0f} ms, p99 {p99:,.0f} ms")
    return all(expected is None or count == expected for _, count, expected in rows)


async def run(options: argparse.Namespace, folder: Path, console: Console) -> bool:
    async with running_stage(folder, shards=options.shards) as stage:
        os.environ.update(stage.environment)
        await stage.wait_until_owned()
        clients = Clients(stage.gateway_url, count=options.sessions, rate=options.rate, poison=not options.calm)
        view = View(clients)
        live = Live(view, console=console, auto_refresh=False) if console.is_terminal else None
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(clients.run())
            with live or contextlib.nullcontext():
                background = [tasks.create_task(watch(stage, view, live))]
                if options.chaos is not None:
                    background.append(tasks.create_task(chaos(stage, view, options.chaos, options.seconds)))
                elif not options.calm:
                    background.append(tasks.create_task(trouble(stage, view, options.seconds)))
                await asyncio.sleep(options.seconds)
                while options.chaos is not None and len(view.kills) < 3:  # noqa: ASYNC110 -- of all three kinds
                    await asyncio.sleep(0.1)
                clients.stop_sending()
                view.tell("the clients stop sending")
                for task in background[1:]:
                    task.cancel()
                await asyncio.gather(*background[1:], return_exceptions=True)
                for name in stage.killed:
                    await stage.start(name)
                dead = await settle(clients, time.monotonic() + DRAIN_SECONDS)
                background[0].cancel()
            sending.cancel()
        if live is None:
            for line in view.story:
                console.print(line)
        await stage.stop_programs()
        await asyncio.to_thread(print_metrics, stage, console)
    print_log_query(folder, console)
    print_trace(folder, console)
    if view.kills:
        console.print("killed: " + ", ".join(f"{name} {count} times" for name, count in sorted(view.kills.items())))
    is_clean = audit(clients, dead, console)
    if not is_clean:
        print_logs(folder, console)
    return is_clean


def print_logs(folder: Path, console: Console) -> None:
    """The last log lines of the programs, without predictions."""
    for log in sorted(folder.glob("*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if "predicted" not in line]
        console.print(f"{log.stem}:", *lines[-30:], sep="\n  ", markup=False)


def print_metrics(stage: Stage, console: Console) -> None:
    pages = stage.client("cloudwatch").get_paginator("list_metrics").paginate(Namespace="ASL/ModelServing")
    names = {metric["MetricName"] for page in pages for metric in page["Metrics"]}
    console.print(f"CloudWatch has {len(names)} metrics, among them: {', '.join(sorted(names & METRICS))}")


def print_log_query(folder: Path, console: Console) -> None:
    """What the Logs Insights query in the README finds in the JSON logs of the service."""
    confidences: dict[str, list[float]] = defaultdict(list)
    for log in folder.glob("service-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):  # the last line of a program that was killed
                entry = json.loads(line)
                if entry.keys() >= QUERIED and entry["prediction"] != "Unknown":
                    confidences[entry["prediction"]].append(entry["confidence"])
    count = sum(len(values) for values in confidences.values())
    averages = ", ".join(f"{name} {sum(found) / len(found):.2f}" for name, found in sorted(confidences.items()))
    console.print(f"{count:,} predictions in the logs; average confidence by prediction: {averages}")


def print_trace(folder: Path, console: Console) -> None:
    """The spans of one hand, from the traces that the programs wrote."""
    found = tracing.whole_traces(folder)
    console.print(f"{len(found)} traces cover the whole way" + (", for example:" if found else ""))
    for span in found[0] if found else ():
        at_ms = (span["start_ns"] - found[0][0]["start_ns"]) / 1e6
        console.print(f"  {at_ms:7.1f} ms  {span['program']:<9} {span['name']:<32} {span['milliseconds']:8.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0, help="how long the clients send (default: 25)")
    parser.add_argument("--rate", type=float, default=200.0, help="hands a second, all clients together (default: 200)")
    parser.add_argument("--sessions", type=int, default=20, help="clients, one session each (default: 20)")
    parser.add_argument("--shards", type=int, default=4, help="shards of each stream (default: 4)")
    parser.add_argument("--calm", action="store_true", help="no faults and no broken hands")
    parser.add_argument("--chaos", type=int, metavar="SEED", help="kill random programs all the time")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="model-serving-") as folder:
        return 0 if asyncio.run(run(options, Path(folder), console)) else 1


if __name__ == "__main__":
    sys.exit(main())

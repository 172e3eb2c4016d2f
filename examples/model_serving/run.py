"""The whole system on this machine, with a live view, a killed worker, a split shard, and an audit at the end.

A hand is one message of a client. A letter is its prediction, which the client gets back. A hand for which the model
keeps failing goes to the dead letters: a queue from which it is tried again, and then the review queue.

    python run.py                        # 25 s, two service workers, with faults
    python run.py --rate 1000 --calm     # a load test: no faults, no broken hands
    python run.py --shards 1 --rate 500 --calm

The audit checks that every hand has a letter or is in the review queue, and that each client got its letters in order.
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

SETTLE_SECONDS = 120.0
"""How long to wait for the last letters. SQS hides the messages of a killed processor for 60 s."""
SILENT_SECONDS = 4.0
"""A worker without a heartbeat for this long is taken for dead. A heartbeat is due every 2.5 s."""
METRICS = {
    "RecordsProcessed",
    "ProcessingLatency",
    "PredictionConfidence",
    "ErrorRate",
    "MillisBehindLatest",
    "ConsumerLag",
    "ActiveShards",
}
"""Those of CloudWatch that the end of a run names."""
PREDICTION_FIELDS = {"time", "session_id", "prediction", "confidence", "processing_time_ms"}
"""The fields by which a log line is recognized as a prediction."""
KILLED_FIRST = ("service-1", "processor", "outbound")
"""One program of each kind. With `--chaos`, the clients send until each of them was killed."""
KILLED_LATER = (*KILLED_FIRST, "service-2")


@dataclass
class View:
    """What the terminal shows, once a second."""

    clients: Clients
    status: anabranch.FleetStatus | None = None
    story: list[str] = field(default_factory=list)
    """What happened in this run, one line each."""
    kills: Counter[str] = field(default_factory=Counter)
    """How often `chaos` killed a program, by its kind."""
    started_at: float = field(default_factory=time.monotonic)
    updated_at: float = field(default_factory=time.monotonic)
    sent_count: int = 0
    answered_count: int = 0
    sent_per_second: float = 0.0
    answered_per_second: float = 0.0

    def tell(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self.started_at:5.1f} s  {text}")

    def update(self) -> None:
        """Reads the counts of the clients, and computes the rates since the last call."""
        now, sent_count, answered_count = time.monotonic(), self.clients.sent_count, self.clients.answered_count
        seconds = now - self.updated_at
        self.sent_per_second = (sent_count - self.sent_count) / seconds
        self.answered_per_second = (answered_count - self.answered_count) / seconds
        self.updated_at, self.sent_count, self.answered_count = now, sent_count, answered_count

    def facts(self) -> Iterator[tuple[str, str]]:
        p50, p99 = latency(self.clients.sessions, last=200)
        yield "hands sent", f"{self.sent_count:,}   {self.sent_per_second:,.0f}/s"
        yield "letters received", f"{self.answered_count:,}   {self.answered_per_second:,.0f}/s"
        yield "without a letter so far", f"{self.sent_count - self.answered_count:,}"
        yield "client to letter", f"p50 {p50:,.0f} ms   p99 {p99:,.0f} ms"
        if self.status is not None:
            shards = self.status.unfinished_shards
            owners = {shard.worker_id for shard in shards if shard.worker_id}
            yield "lag", lag_text(self.status)
            yield "workers", f"{len(self.status.live_members)} alive, {len(owners)} with shards, {len(shards)} shards"

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, value in self.facts():
            table.add_row(f"[bold]{name}", value)
        for line in self.story[-8:]:
            table.add_row("", f"[dim]{line}")
        return table


def lag_text(status: anabranch.FleetStatus) -> str:
    """The lag that the workers report. Nobody reports the shards of a killed worker: their lag is at least the time
    since its last heartbeat.
    """
    silent_seconds = {
        member.member_id: member.heartbeat_age for member in status.members if member.heartbeat_age > SILENT_SECONDS
    }
    lags = [
        max(silent_seconds[shard.owner], shard.lag or 0.0)
        for shard in status.unfinished_shards
        if shard.owner in silent_seconds
    ]
    if lags:
        return f"at least {max(lags):.1f} s; shards that wait for a new worker: {len(lags)}"
    return "unknown" if status.lag is None else f"{status.lag:.1f} s"


def latency(sessions: list[Session], last: int | None = None) -> tuple[float, float]:
    """The median and the 99th percentile in milliseconds, of all letters or of the `last` ones of each session."""
    values = sorted(
        value for session in sessions for value in (session.latencies_ms[-last:] if last else session.latencies_ms)
    )
    return (values[len(values) // 2], values[int(len(values) * 0.99)]) if values else (0.0, 0.0)


async def watch(stage: Stage, view: View, live: Live | None) -> None:
    """Updates the view; on anything but a terminal it prints a line every five seconds."""
    async with anabranch.Application("letter-model") as application:
        for second in itertools.count(1):
            await asyncio.sleep(1.0)
            stage.check()
            view.update()
            with contextlib.suppress(LeaseStoreError):  # the store did not answer: the view keeps what it has
                view.status = await application.status()
            if live is not None:
                live.update(view, refresh=True)
            elif second % 5 == 0:
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
    """Kills a random program every few seconds, and starts it again. The first three kills are of three kinds."""
    rng = random.Random(seed)  # noqa: S311 -- no secrets
    pause_seconds_max = min(5.0, seconds / 6)
    first = rng.sample(KILLED_FIRST, len(KILLED_FIRST))
    while True:
        await asyncio.sleep(rng.uniform(0.2, 1.0) * pause_seconds_max)
        name = first.pop() if first else rng.choice(KILLED_LATER)
        await stage.kill(name)
        view.kills[name.partition("-")[0]] += 1
        await asyncio.sleep(rng.uniform(0.0, 0.4) * pause_seconds_max)
        await stage.start(name)
        view.tell(f"killed {name} (SIGKILL) and started it again")


async def read_review_queue() -> set[tuple[str, int]]:
    """The hands in the review queue, by session and number."""
    hands: set[tuple[str, int]] = set()
    async with anabranch.DeadLetters(f"sqs://{REVIEW_QUEUE}") as review:
        async for letter in review.letters():
            hand = msgspec.json.decode(letter.payload, type=Landmarks)
            hands.add((hand.session_id, hand.number))
    return hands


async def settle(clients: Clients, deadline: float) -> set[tuple[str, int]]:
    """Waits until every hand has a letter or is in the review queue. Returns those in the queue."""
    in_review: set[tuple[str, int]] = set()
    while True:
        unanswered = {(session.session_id, number) for session in clients.sessions for number in session.unanswered}
        if unanswered - in_review:
            in_review |= await read_review_queue()
        if not unanswered - in_review or time.monotonic() > deadline:
            return in_review
        await asyncio.sleep(0.5)


def audit(clients: Clients, in_review: set[tuple[str, int]], console: Console) -> bool:
    """Prints the counts. Returns whether those that show a fault are all zero."""
    sessions = clients.sessions
    lost = {(session.session_id, number) for session in sessions for number in session.unanswered} - in_review
    both = {(session.session_id, number) for session in sessions for number in session.answered} & in_review
    disorder_count = sum(len(session.disorder) for session in sessions)
    never_sent_count = sum(len(session.answered.keys() - session.sent.keys()) for session in sessions)
    right_count = sum(session.right_count for session in sessions)
    p50, p99 = latency(sessions)
    # Each row: the name, the count, and the expected count if there is one.
    rows = [
        ("hands sent", clients.sent_count, None),
        ("letters received", clients.answered_count, None),
        ("  of them redriven from the dead letters", sum(len(session.redriven) for session in sessions), None),
        ("in the review queue, after three more attempts", len(in_review), None),
        ("repeats that the clients dropped", sum(session.repeat_count for session in sessions), None),
        ("without a letter and not in the review queue", len(lost), 0),
        ("with a letter and also in the review queue", len(both), 0),
        ("letters out of order", disorder_count, 0),
        ("letters for hands that were never sent", never_sent_count, 0),
        ("hands refused by the gateway", len(clients.errors), 0),
    ]
    table = Table(title="Audit", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    for name, count, expected in rows:
        mark = "" if expected is None else " [green]ok" if count == expected else " [red]WRONG"
        table.add_row(name, f"{count:,}{mark}")
    console.print(table)
    console.print(f"predicted right: {right_count / max(1, clients.answered_count):.1%}")
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
                watching = tasks.create_task(watch(stage, view, live))
                faults: list[asyncio.Task[None]] = []
                if options.chaos is not None:
                    faults.append(tasks.create_task(chaos(stage, view, options.chaos, options.seconds)))
                elif not options.calm:
                    faults.append(tasks.create_task(trouble(stage, view, options.seconds)))
                await asyncio.sleep(options.seconds)
                if options.chaos is not None:
                    while len(view.kills) < len(KILLED_FIRST):  # noqa: ASYNC110 -- until each kind was killed
                        await asyncio.sleep(0.1)
                clients.stop_sending()
                view.tell("the clients stop sending")
                for task in faults:
                    task.cancel()
                await asyncio.gather(*faults, return_exceptions=True)
                for name in stage.killed:  # those that a cancelled task has not started again
                    await stage.start(name)
                in_review = await settle(clients, time.monotonic() + SETTLE_SECONDS)
                watching.cancel()
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
    is_clean = audit(clients, in_review, console)
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
                if entry.keys() >= PREDICTION_FIELDS and entry["prediction"] != "Unknown":
                    confidences[entry["prediction"]].append(entry["confidence"])
    count = sum(len(values) for values in confidences.values())
    averages = ", ".join(f"{name} {sum(values) / len(values):.2f}" for name, values in sorted(confidences.items()))
    console.print(f"{count:,} predictions in the logs; average confidence by prediction: {averages}")


def print_trace(folder: Path, console: Console) -> None:
    """The spans of one hand, from the traces that the programs wrote."""
    traces = tracing.whole_traces(folder)
    console.print(f"{len(traces)} traces cover the whole way" + (", for example:" if traces else ""))
    for span in traces[0] if traces else ():
        at_ms = (span["start_ns"] - traces[0][0]["start_ns"]) / 1e6
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

"""Runs the benchmarks named on the command line, or all: `python benchmarks/run.py codec`.

Each runs in its own process, so what one imports, allocates or patches does not slow the next. The codecs run twice:
pure Python and compiled. The last lines say which targets are met and missed. All results are in `.benchmarks`, as JSON
and as an HTML page.
"""

import datetime as dt
import html
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / ".benchmarks"
# Modules that benchmarks import, and benchmarks that are run by hand because they need servers and take minutes.
NOT_RUN = {
    "measure", "run", "native_kcl", "kclpy", "kclpy_worker", "dynamodb_cost", "instructions", "store_calls",
}  # fmt: skip
BOTH_BUILDS = {"codec"}
MINUTES_MAX = 15.0
"""The target for a run of all benchmarks."""
# The packages that the benchmarks compare with, and those that they need.
PEERS = (
    "aiobotocore", "aiokpl", "async-kinesis", "aws-kinesis-agg", "boto3", "moto", "msgspec", "native-aws-kcl-py",
    "protobuf",
)  # fmt: skip


def main() -> int:
    known = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_RUN)
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        print(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(exist_ok=True)
    results_file = RESULTS / "results.jsonl"  # each benchmark appends to it
    results_file.unlink(missing_ok=True)
    compiled = subprocess.run(
        [sys.executable, HERE.parent / "tests" / "compiled.py", "--build"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    environment = {**os.environ, "ANABRANCH_BENCH_RESULTS": str(results_file), "ANABRANCH_COMPILED": compiled}
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    failed, seconds = [], {}
    for name in names:
        builds = [{}, {"PYTHONPATH": compiled}] if name in BOTH_BUILDS else [{}]
        for build in builds:
            print(f"\n== {name}{' (compiled)' if build else ''} ==", flush=True)
            started = time.monotonic()
            if subprocess.run([sys.executable, HERE / f"{name}.py"], env=environment | build, check=False).returncode:
                failed.append(name)
            seconds[name] = round(seconds.get(name, 0) + time.monotonic() - started, 1)
    results = [json.loads(line) for line in results_file.read_text().splitlines()] if results_file.exists() else []
    minutes = sum(seconds.values()) / 60
    print(f"\nthe benchmarks took {minutes:.1f} minutes")
    if names == known:
        total = {"kind": "target", "benchmark": "run", "name": "minutes for all benchmarks", "value": round(minutes, 1)}
        results.append(total | {"wanted": MINUTES_MAX, "at_least": False, "met": minutes <= MINUTES_MAX})
    print_targets([result for result in results if result["kind"] == "target"])
    print("\nseconds: " + ", ".join(f"{name} {taken:.0f}" for name, taken in seconds.items()))
    write(results, seconds)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def machine() -> dict[str, str]:
    processor = platform.machine()
    if (cpu := Path("/proc/cpuinfo")).exists():
        models = [line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if "model name" in line]
        processor = f"{models[0]} x {len(models)}" if models else processor
    return {
        "Python": f"{platform.python_version()} ({platform.python_compiler()})",
        "system": platform.system(),
        "processor": processor,
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def print_targets(targets: list[dict]) -> None:
    missed = [target for target in targets if not target["met"]]
    print(f"\n{len(targets) - len(missed)} targets met, {len(missed)} missed")
    for target in missed:
        wanted = f"at {'least' if target['at_least'] else 'most'} {target['wanted']:g}"
        print(f"  missed: {target['name']}: {target['value']:.2f}, {wanted}")


def versions() -> dict[str, str]:
    """The versions of the peers: as installed here, or else as pinned for their own environment."""
    pinned = (HERE.parent / "requirements" / "native-kcl.txt").read_text().split()
    found = {
        name: version for name, _, version in (line.partition("==") for line in pinned) if name in PEERS and version
    }
    for name in PEERS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write(results: list[dict], seconds: dict[str, float]) -> None:
    report = {
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "seconds": seconds,
        "results": results,
    }
    (RESULTS / "results.json").write_text(json.dumps(report, indent=1))
    (RESULTS / "index.html").write_text(page(report))
    print(f"written: {RESULTS / 'results.json'} and {RESULTS / 'index.html'}")


def page(report: dict) -> str:
    """The report as an HTML page: targets, single values, and a chart for each table of figures."""
    results = report["results"]
    parts = [f"<h1>Benchmarks</h1><p>{report['at']}</p><ul>"]
    facts = report["machine"] | report["versions"]
    parts += [f"<li>{name}: {html.escape(value)}</li>" for name, value in facts.items()]
    parts.append("</ul><h2>Targets</h2><table>")
    for target in results:
        if target["kind"] == "target":
            sign, verdict = "≥" if target["at_least"] else "≤", "met" if target["met"] else "<b>missed</b>"
            parts.append(
                f"<tr><td>{html.escape(target['name'])}</td><td>{target['value']:.2f}</td>"
                f"<td>{sign} {target['wanted']:g}</td><td>{verdict}</td></tr>"
            )
    parts.append("</table><h2>Other figures</h2><table>")
    for value in results:
        if value["kind"] == "value":
            name = html.escape(f"{value['benchmark']}: {value['name']}")
            parts.append(f"<tr><td>{name}</td><td>{value['value']:g} {html.escape(value['unit'])}</td></tr>")
    parts.append("</table>")
    tables: dict[tuple[str, str, str], list[dict]] = defaultdict(list)
    for figure in results:
        if figure["kind"] == "figure":
            tables[figure["benchmark"], figure["table"], figure["unit"]].append(figure)
    for (benchmark, title, unit), rows in tables.items():
        parts.append(f"<h2>{html.escape(f'{benchmark}: {title}')}</h2>{plot(rows, unit)}")
    style = "body{font:15px system-ui;max-width:60em;margin:2em auto}td{padding:.2em 1em .2em 0}"
    return f"<!doctype html><meta charset=utf-8><title>anabranch</title><style>{style}</style>{''.join(parts)}"


def plot(rows: list[dict], unit: str) -> str:
    """A chart: horizontal bars of CPU time, with the quartiles as a line. All lengths are in pixels."""
    label_width, length_max, row_height = 200, 420, 22
    scale = length_max / max(max(row["high"], row["microseconds"]) for row in rows)
    parts = []
    for number, row in enumerate(rows):
        y, length = row_height * number, row["microseconds"] * scale
        low, high = label_width + row["low"] * scale, label_width + row["high"] * scale
        # Ours are blue. Grey are the peers, and md5 as the floor that the format sets.
        color = "#9aa7b4" if row["name"].replace(",", " ").split()[0] in (*PEERS, "md5") else "#2a6f97"
        parts.append(
            f"<text x={label_width - 5} y={y + 15} text-anchor=end>{html.escape(row['name'])}</text>"
            f"<rect x={label_width} y={y + 3} width={length:.1f} height=15 fill='{color}' />"
            f"<line x1={low:.1f} x2={high:.1f} y1={y + 10} y2={y + 10} stroke=black />"
            f"<text x={max(label_width + length, high) + 6:.1f} y={y + 15}>{row['microseconds']:.2f}</text>"
        )
    return (
        f"<p>us of CPU per {unit}</p>"
        f"<svg width=720 height={row_height * len(rows)} font-size=13 font-family=system-ui>{''.join(parts)}</svg>"
    )


if __name__ == "__main__":
    sys.exit(main())

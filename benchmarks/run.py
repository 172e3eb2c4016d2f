"""Runs the benchmarks named on the command line, or all: `python benchmarks/run.py codec`.

Each is a process of its own: what one imports, allocates or patches does not slow the next. The codecs run twice, pure
and compiled. The last lines say which targets are met and missed; `.benchmarks` has everything as JSON and as a page.
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
# Imported by others, or run by hand because they need servers and take minutes.
NO_BENCHMARKS = {
    "measure", "run", "native_kcl", "kclpy", "kclpy_worker", "dynamodb_cost", "instructions", "store_calls",
}  # fmt: skip
BOTH_BUILDS = {"codec"}
MINUTES_MAX = 15.0
PEERS = (
    "aiobotocore", "aiokpl", "async-kinesis", "aws-kinesis-agg", "boto3", "moto", "msgspec", "native-aws-kcl-py",
    "protobuf",
)  # fmt: skip


def main() -> int:
    known = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NO_BENCHMARKS)
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        print(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(exist_ok=True)
    lines = RESULTS / "results.jsonl"
    lines.unlink(missing_ok=True)
    compiled = subprocess.run(
        [sys.executable, HERE.parent / "tests" / "compiled.py", "--build"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    environment = {**os.environ, "ANABRANCH_BENCH_RESULTS": str(lines), "ANABRANCH_COMPILED": compiled}
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
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    minutes = sum(seconds.values()) / 60
    print(f"\nall of this took {minutes:.1f} minutes")
    if names == known:
        whole = {"kind": "bar", "benchmark": "run", "name": "minutes for the whole table", "value": round(minutes, 1)}
        found.append(whole | {"wanted": MINUTES_MAX, "at_least": False, "met": minutes <= MINUTES_MAX})
    print_bars([one for one in found if one["kind"] == "bar"])
    print("\nseconds: " + ", ".join(f"{name} {taken:.0f}" for name, taken in seconds.items()))
    write(found, seconds)
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


def print_bars(bars: list[dict]) -> None:
    missed = [one for one in bars if not one["met"]]
    print(f"\n{len(bars) - len(missed)} targets met, {len(missed)} missed")
    for one in missed:
        wanted = f"at {'least' if one['at_least'] else 'most'} {one['wanted']:g}"
        print(f"  missed: {one['name']}: {one['value']:.2f}, {wanted}")


def versions() -> dict[str, str]:
    """The versions of the peers that are installed here, or pinned for an environment of their own."""
    pinned = (HERE.parent / "requirements" / "native-kcl.txt").read_text().split()
    found = {
        name: version for name, _, version in (line.partition("==") for line in pinned) if name in PEERS and version
    }
    for name in PEERS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write(found: list[dict], seconds: dict[str, float]) -> None:
    whole = {
        "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "seconds": seconds,
        "results": found,
    }
    (RESULTS / "results.json").write_text(json.dumps(whole, indent=1))
    (RESULTS / "index.html").write_text(page(whole))
    print(f"written: {RESULTS / 'results.json'} and {RESULTS / 'index.html'}")


def page(whole: dict) -> str:
    tables: dict[tuple[str, str, str], list[dict]] = defaultdict(list)
    for one in whole["results"]:
        if one["kind"] == "figure":
            tables[one["benchmark"], one["table"], one["unit"]].append(one)
    parts = [f"<h1>Benchmarks</h1><p>{whole['at']}</p><ul>"]
    parts += [f"<li>{key}: {html.escape(value)}</li>" for key, value in (whole["machine"] | whole["versions"]).items()]
    parts.append("</ul><h2>Bars</h2><table>")
    for one in whole["results"]:
        if one["kind"] == "bar":
            word, sign = ("met", "≥") if one["at_least"] else ("met", "≤")
            word = word if one["met"] else "<b>missed</b>"
            parts.append(
                f"<tr><td>{html.escape(one['name'])}</td><td>{one['value']:.2f}</td>"
                f"<td>{sign} {one['wanted']:g}</td><td>{word}</td></tr>"
            )
    parts.append("</table><h2>Other figures</h2><table>")
    for one in whole["results"]:
        if one["kind"] == "value":
            name = html.escape(f"{one['benchmark']}: {one['name']}")
            parts.append(f"<tr><td>{name}</td><td>{one['value']:g} {html.escape(one['unit'])}</td></tr>")
    parts.append("</table>")
    for (benchmark, title, unit), rows in tables.items():
        parts.append(f"<h2>{html.escape(f'{benchmark}: {title}')}</h2>{plot(rows, unit)}")
    style = "body{font:15px system-ui;max-width:60em;margin:2em auto}td{padding:.2em 1em .2em 0}"
    return f"<!doctype html><meta charset=utf-8><title>anabranch</title><style>{style}</style>{''.join(parts)}"


def plot(rows: list[dict], unit: str) -> str:
    """Horizontal bars of CPU time, with the quartiles as a line."""
    scale = 420 / max(max(row["high"], row["microseconds"]) for row in rows)
    parts = []
    for number, row in enumerate(rows):
        y, length = 22 * number, row["microseconds"] * scale
        low, high = 200 + row["low"] * scale, 200 + row["high"] * scale
        color = "#9aa7b4" if row["name"].replace(",", " ").split()[0] in (*PEERS, "md5") else "#2a6f97"
        parts.append(
            f"<text x=195 y={y + 15} text-anchor=end>{html.escape(row['name'])}</text>"
            f"<rect x=200 y={y + 3} width={length:.1f} height=15 fill='{color}' />"
            f"<line x1={low:.1f} x2={high:.1f} y1={y + 10} y2={y + 10} stroke=black />"
            f"<text x={max(200 + length, high) + 6:.1f} y={y + 15}>{row['microseconds']:.2f}</text>"
        )
    return (
        f"<p>us of CPU per {unit}</p>"
        f"<svg width=720 height={22 * len(rows)} font-size=13 font-family=system-ui>{''.join(parts)}</svg>"
    )


if __name__ == "__main__":
    sys.exit(main())

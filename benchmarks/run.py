"""Runs the benchmarks named on the command line, or all: `python benchmarks/run.py codec`."""

import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NO_BENCHMARKS = {"measure", "run"}


def main() -> int:
    known = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NO_BENCHMARKS)
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        print(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    print(
        f"Python {platform.python_version()} ({platform.python_compiler()}), {platform.machine()}, {platform.system()}"
    )
    failed = []
    for name in names:
        print(f"\n== {name} ==", flush=True)
        # A process each: what one benchmark imports, allocates or patches does not slow the next.
        if subprocess.run([sys.executable, HERE / f"{name}.py"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

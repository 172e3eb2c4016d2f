"""Installs each sdist and wheel of a folder into a clean environment without extras, and uses it: `make smoke`.

The dependencies come from PyPI, so this is no test: run it by hand before a release.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

USE = """
import sys
import anabranch

assert "botocore" not in sys.modules, "importing anabranch loads botocore"
for name in anabranch.__all__:
    getattr(anabranch, name)
extras = {"redis", "opentelemetry", "prometheus_client", "cryptography"} & set(sys.modules)
assert not extras, f"importing all public names needs {extras}"
"""


def main(folder: Path) -> int:
    for built in sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")]):
        with tempfile.TemporaryDirectory(prefix="anabranch-smoke-") as scratch:
            subprocess.run([sys.executable, "-m", "venv", f"{scratch}/venv"], check=True)
            python, anabranch = f"{scratch}/venv/bin/python", f"{scratch}/venv/bin/anabranch"
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            commands = (
                [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", str(built.resolve())],
                [python, "-m", "pip", "check"],
                [python, "-c", USE],
                [anabranch, "--version"],
                [anabranch, "serve", "--create", "orders:2", "--", anabranch, "put", "orders", "hello", "--key", "a"],
                [anabranch, "demo", "--seconds", "3", "--seed", "1"],
            )
            for command in commands:
                done = subprocess.run(
                    command,
                    cwd=scratch,
                    env=environment,
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    check=False,
                )
                if done.returncode:
                    print(f"{built.name}: {' '.join(command)}\n{done.stdout}{done.stderr}", file=sys.stderr)
                    return 1
        print(f"{built.name}: installed and used")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Other Pythons, and the oldest dependencies that pyproject.toml allows: `make matrix`.

For each installed interpreter (3.11 and newer, on the path or under pyenv), runs a quick part of the tests in a
temporary environment with the newest dependencies; for the first one also with the oldest. Interpreters that are not
installed are listed and skipped.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# What touches the interpreter and the dependencies most: codecs, connections, botocore, the local server.
QUICK_TESTS = (
    "tests/unit/wire",
    "tests/unit/http",
    "tests/unit/aws",
    "tests/conformance/test_client_against_botocore.py",
    "tests/conformance/test_sigv4_against_botocore.py",
)
TEST_TOOLS = (
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "blockbuster",
    "boto3",
    "cryptography>=46",
    "h11",
    "cbor2",
    "protobuf",
)
# Clients that tests compare with; they follow the newest botocore and cannot be installed beside the oldest.
NEWEST_ONLY = ("aiobotocore",)


def main() -> int:
    outcomes: list[tuple[str, str]] = []
    for version in PYTHONS:
        python = find_python(version)
        if python is None:
            outcomes.append((f"Python {version}", "not installed here"))
            continue
        labels = ("newest", "oldest") if version == PYTHONS[0] else ("newest",)
        for label in labels:
            name = f"Python {version}, {label} dependencies"
            print(f"== {name} ==", flush=True)
            outcomes.append((name, "passed" if run_in(python, label) else "FAILED"))
    print("\nmatrix")
    for name, outcome in outcomes:
        print(f"  {name:36}{outcome}")
    return any(outcome == "FAILED" for _, outcome in outcomes)


def find_python(version: str) -> str | None:
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    for candidate in filter(None, candidates):
        shown = subprocess.run([candidate, "-V"], capture_output=True, text=True, check=False).stdout
        if shown.startswith(f"Python {version}."):
            return candidate
    return None


def oldest_dependencies() -> tuple[str, ...]:
    """Each lower bound of the project as a pin: `botocore>=1.35` is tested as 1.35.*."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = []
    for requirement in project["dependencies"]:
        found = re.fullmatch(r"([A-Za-z0-9_-]+)>=([0-9.]+)", requirement)
        if found is None:
            raise SystemExit(f"{requirement!r}: a dependency is named with its lower bound alone")
        pins.append(f"{found[1]}=={found[2]}.*")
    return tuple(pins)


def run_in(python: str, label: str) -> bool:
    """The oldest dependencies cause deprecation warnings on newer Pythons, so these are no errors there."""
    with tempfile.TemporaryDirectory(prefix="anabranch-matrix-") as folder:
        environment = Path(folder) / "venv"
        inside = environment / "bin" / "python"
        packages = NEWEST_ONLY if label == "newest" else oldest_dependencies()
        warnings = () if label == "newest" else ("-W", "default::DeprecationWarning")
        steps = (
            [python, "-m", "venv", str(environment)],
            [*installer(inside), "-e", str(ROOT), *packages, *TEST_TOOLS],
            [str(inside), "-m", "pytest", "-q", "-p", "no:cacheprovider", *warnings, *QUICK_TESTS],
        )
        for step in steps:
            if subprocess.run(step, cwd=ROOT, check=False, env=clean_environment()).returncode:
                print(f"failed: {' '.join(step[:6])} ...", flush=True)
                return False
    return True


def installer(python: Path) -> list[str]:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is not None:
        return [uv, "pip", "install", "-q", "--python", str(python)]
    return [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}


if __name__ == "__main__":
    sys.exit(main())

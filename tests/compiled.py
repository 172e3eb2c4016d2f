"""Builds the wheel with compiled codecs and runs the tests of the codecs on it: `python tests/compiled.py`.

The wheel is built from the sdist, because the compiler leaves its output beside the sources, where the development
environment would import it. It is unpacked under .venv/compiled and rebuilt when a source changes; as PYTHONPATH, that
folder comes before the editable installation, in child processes too. `--build` only builds and prints the folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT / ".venv" / "compiled"
SOURCES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "src")
TESTS = (
    "tests/unit/model",
    "tests/unit/wire",
    "tests/unit/core/reading",
    "tests/unit/core/writing",
    "tests/property",
    "tests/fuzz",
    "tests/conformance",
)
NO_CODECS = ("test_dynamodb_contract.py", "test_lease_stores.py", "test_http_against_h11.py")
CHECK = """
from anabranch._cli.doctor import _versions
from anabranch._model import hash_keys
from anabranch._wire import aggregate
wrong = [module.__file__ for module in (hash_keys, aggregate) if module.__file__.endswith(".py")]
assert not wrong, f"not compiled: {wrong}"
assert "codecs: compiled" in _versions().finding, _versions().finding
"""


def main(arguments: list[str]) -> int:
    folder = build()
    if "--build" in arguments:
        print(folder)
        return 0
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if code := subprocess.run([sys.executable, "-c", CHECK], env=environment, check=False).returncode:
        return code
    ignored = [f"--ignore=tests/conformance/{name}" for name in NO_CODECS]
    options = ["-q", "--no-header", "-n", str(min(2, os.cpu_count() or 1)), "--dist", "worksteal"]
    chosen = ["-m", "not long and not soak and not services", *arguments]
    command = [sys.executable, "-m", "pytest", *TESTS, *ignored, *options, *chosen]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def build() -> Path:
    """The folder with the compiled package."""
    folder = COMPILED / digest()
    if folder.exists():
        return folder
    shutil.rmtree(COMPILED, ignore_errors=True)
    print("building the wheel with compiled codecs", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="anabranch-compiled-") as scratch:
        hatchling, pip = [sys.executable, "-m", "hatchling"], [sys.executable, "-m", "pip"]
        subprocess.run([*hatchling, "build", "-t", "sdist", "-d", scratch], cwd=ROOT, check=True, capture_output=True)
        (sdist,) = Path(scratch).glob("*.tar.gz")
        subprocess.run(
            [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", scratch, sdist],
            env={**os.environ, "HATCH_BUILD_HOOK_ENABLE_MYPYC": "1"},
            check=True,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        assert not wheel.name.endswith("-none-any.whl"), f"{wheel.name} is not a platform wheel"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch) / "package")
        COMPILED.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(scratch) / "package", folder)
    return folder


def digest() -> str:
    """Of everything that the wheel is made of, and the interpreter."""
    found = hashlib.sha256(sys.version.encode())
    for name in SOURCES:
        for path in sorted((ROOT / name).rglob("*")) or [ROOT / name]:
            if path.is_file() and path.suffix != ".pyc":
                found.update(path.relative_to(ROOT).as_posix().encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What `import anabranch` offers, and what it does not load."""

import subprocess
import sys

import pytest

import anabranch

HEAVY = {
    "anabranch._aws", "anabranch._engine", "anabranch._http", "anabranch.local", "anabranch.stores",
    "anabranch.testing", "aiohttp", "asyncio", "boto3", "botocore", "concurrent.futures", "cryptography", "h2",
    "multiprocessing", "pydantic", "rich", "sqlite3", "ssl",
}  # fmt: skip


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_public_names_are_in_alphabetical_order():
    assert anabranch.__all__ == sorted(anabranch.__all__)
    assert len(set(anabranch.__all__)) == len(anabranch.__all__)


@pytest.mark.parametrize("name", anabranch.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(anabranch, name) is not None


def test_public_names_are_whole_and_the_rest_says_so_in_one_line():
    with pytest.raises(AttributeError, match="module 'anabranch' has no attribute 'Consummer'"):
        _ = anabranch.Consummer


def test_importing_the_package_loads_nothing_heavy():
    loaded = run_python("import sys, anabranch; print(*sys.modules)")
    assert sorted(HEAVY.intersection(loaded)) == []


def test_a_star_import_gives_the_public_names():
    names = run_python("from anabranch import *; print(*dir())")
    assert set(anabranch.__all__) <= set(names)


def test_dir_lists_the_names_that_are_not_loaded_yet():
    listed = run_python("import anabranch; print(*dir(anabranch))")
    assert set(anabranch.__all__) <= set(listed)


def test_modules_of_public_values_need_no_import_of_their_own():
    assert run_python("import anabranch; print(anabranch.events.Event.__name__, anabranch.limits.MIB)")

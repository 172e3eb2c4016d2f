"""The docs have every option: every option of the facades, and of every command."""

import argparse
import inspect
import re
from pathlib import Path

import pytest

from anabranch import Consumer, Producer, SyncProducer
from anabranch._cli.command_line import COMMANDS, load

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHARED = {"--help", "--region", "--profile", "--endpoint-url"}


@pytest.mark.parametrize(
    "facade, page", [(Consumer, "consumer.md"), (Producer, "producer.md"), (SyncProducer, "producer.md")]
)
def test_every_option_of_a_facade_is_in_its_table(facade, page):
    table = (DOCS / page).read_text().partition("## All options")[2].partition("\n## ")[0]
    cells = "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert re.findall(r"`(\w+)`", cells) == list(inspect.signature(facade).parameters)


def options(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options(inner)
        elif action.help == argparse.SUPPRESS:
            continue  # between our own processes
        elif action.option_strings:
            yield action.option_strings[-1]
        else:
            yield str(action.metavar)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_in_its_section(name):
    parser = argparse.ArgumentParser()
    load(name)(parser)
    if name == "serve":
        section = (DOCS / "local-server.md").read_text()
    else:
        section = (DOCS / "cli.md").read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    usage = section.partition("```text\n")[2].partition("```")[0]
    missing = [option for option in {*options(parser)} - SHARED if not re.search(rf"(?<![\w-]){option}\b", usage)]
    assert missing == []


def actions(name):
    parser = argparse.ArgumentParser()
    load(name)(parser)
    return {
        choice
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action.choices
    }


def test_every_command_that_a_text_names_exists():
    """Error messages and advice are copied into a shell."""
    with_actions = {name: found for name in COMMANDS if (found := actions(name))}
    named = re.compile(rf"anabranch ({'|'.join(with_actions)}) +([a-z]+)")
    files = [
        path
        for folder in ("src", "docs", "examples")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in {".py", ".md"}
    ]
    wrong = {
        (path.name, match[0])
        for path in files
        for match in named.finditer(path.read_text())
        if match[2] not in with_actions[match[1]]
    }
    assert with_actions
    assert not wrong

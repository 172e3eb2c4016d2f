"""A type checker accepts every signature that a handler may have, and refuses every other one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import asyncio
from dataclasses import dataclass
from typing import Any

from anabranch import Batch, Consumer, Context, Record
from anabranch.testing import simulate


@dataclass
class Order:
    item: str


def decode(data: bytes) -> Order:
    return Order(data.decode())


def consumer() -> Consumer[bytes]:
    return Consumer("orders", app="billing")


def orders() -> Consumer[Order]:
    return Consumer("orders", app="billing", decode=decode)


async def takes_a_record(record: Record[bytes]) -> None: ...
async def takes_the_context(record: Record[bytes], context: Context) -> int:
    return context.attempt
def is_plain(record: Record[bytes]) -> str:
    return record.value.decode()
async def has_a_default(record: Record[bytes], context: Context | None = None) -> None: ...
async def takes_an_order(record: Record[Order]) -> None: ...
async def takes_anything(record: Record[Any]) -> None: ...
async def takes_a_batch(batch: Batch[bytes]) -> None: ...
async def takes_a_batch_and_the_context(batch: Batch[Order], context: Context) -> None: ...
async def takes_nothing() -> None: ...
async def takes_three(record: Record[bytes], context: Context, more: str) -> None: ...
async def takes_data(data: bytes) -> None: ...
async def needs_a_keyword(record: Record[bytes], *, table: str) -> None: ...


consumer().handler(takes_a_record)
consumer().handler(takes_the_context)
consumer().handler(is_plain)
consumer().handler(has_a_default)
consumer().handler(takes_anything)
consumer().handler(lambda record: print(record.value))
consumer().batch_handler(max_wait=0.1)(takes_a_batch)
orders().handler(takes_an_order)
orders().batch_handler()(takes_a_batch_and_the_context)
consumer().run_sync(takes_a_record)
asyncio.run(consumer().run(takes_the_context))
asyncio.run(consumer().run_batches(takes_a_batch))
simulate(takes_a_record, [])

@consumer().handler
async def decorated(record: Record[bytes]) -> int:
    return 1

async def calls_it(record: Record[bytes]) -> int:
    return await decorated(record)

consumer().handler(takes_nothing)  # refused
consumer().handler(takes_three)  # refused
consumer().handler(takes_data)  # refused
consumer().handler(needs_a_keyword)  # refused
consumer().handler(takes_an_order)  # refused
orders().handler(takes_a_record)  # refused
consumer().handler(takes_a_batch)  # refused
consumer().batch_handler()(takes_a_record)  # refused
orders().batch_handler()(takes_a_batch)  # refused
asyncio.run(consumer().run(takes_nothing))  # refused
consumer().run_sync(takes_an_order)  # refused
asyncio.run(consumer().run_batches(takes_a_record))  # refused
simulate(takes_nothing, [])  # refused
"""


@pytest.mark.timeout(300)
def test_a_type_checker_refuses_wrong_handlers_and_no_others(tmp_path):
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, failures, _ = api.run([*options, "--follow-imports", "silent", str(program)])
    refused = {int(number) for number in re.findall(r"program\.py:(\d+): error", said)}
    expected = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# refused")}
    assert failures == ""
    assert refused == expected, said

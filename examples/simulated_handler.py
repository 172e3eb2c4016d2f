"""A test of a handler with the simulator: crashes and splits in virtual time, the same in every run.

In a project this is a test file that pytest runs; here it runs as a program.
"""

from collections import Counter

import anabranch
from anabranch.testing import simulate

calls: Counter[str] = Counter()


async def handle(record: anabranch.Record[dict[str, int]]) -> None:
    calls[f"{record.partition_key}/{record.value['order']}"] += 1


orders = [(f"customer-{number % 7}", b'{"order": %d}' % number) for number in range(200)]
report = simulate(handle, orders, workers=3, order="key", decode=dict, faults=["crash", "reshard"], seed=1)
report.check()  # raises if a record is lost or out of order, and names the seed
print(f"{len(calls)} orders handled, {calls.total() - len(calls)} repeats after crashes")

"""Law (B2, P5): the bytes that a window is charged come back whole, once, when all is finished or all is cleared."""

import random

from hypothesis import given, strategies as st

from anabranch._core.reading.window import RecordSlice, Unpacker, Window
from anabranch._model.streams import Position
from shard_records import SHARD, STREAM, aggregated, plain

KEYS = st.text(min_size=1, max_size=3)
SUBS = st.lists(st.tuples(KEYS, st.binary(max_size=20)), min_size=1, max_size=30)
UNITS = st.lists(st.tuples(KEYS, st.binary(max_size=50)) | SUBS, max_size=12)


class Account:
    """A window with a ledger beside it."""

    def __init__(self, units, draw):
        self.window = Window(Unpacker(STREAM, SHARD, None))
        self.draw = draw
        self.unread = [
            plain(number, *unit) if isinstance(unit, tuple) else aggregated(number, *unit)
            for number, unit in enumerate(units, 1)
        ]
        self.out = []
        self.charged = self.freed = 0

    def accept(self):
        count = self.draw.randint(0, 4)
        page, self.unread = self.unread[:count], self.unread[count:]
        # Now and then a read begins with what was handled before, which is then charged and dropped.
        after = Position(int(page[0].sequence_number), self.draw.randint(-1, 30)) if page else None
        self.charged += self.window.accept(page, self.draw.choice((None, after)))

    def pull(self):
        pulled = self.window.pull()
        if pulled is not None:
            self.out.append(pulled)

    def pull_some(self):
        pulled = self.window.pull_some(self.draw.randint(1, 5), self.draw.randint(0, 40))
        if pulled is not None:
            self.out.append(pulled)

    def finish(self):
        if self.out:
            out = self.out.pop(self.draw.randrange(len(self.out)))
            if isinstance(out, RecordSlice):
                self.window.finish_some(out)
            else:
                self.window.finish(*out)

    def step(self):
        self.draw.choice((self.accept, self.pull, self.pull_some, self.finish))()
        self.settle()

    def settle(self):
        freed = self.window.collect_freed()
        assert freed >= 0
        self.freed += freed
        assert self.freed <= self.charged


@given(units=UNITS, seed=st.integers(0, 2**32))
def test_all_charged_bytes_come_back_when_everything_is_finished(units, seed):
    account = Account(units, random.Random(seed))
    for _ in range(20_000):
        account.step()
        if not account.unread and not account.out and account.window.is_empty:
            break
    account.settle()
    assert account.freed == account.charged


@given(units=UNITS, seed=st.integers(0, 2**32), step_count=st.integers(0, 60))
def test_all_charged_bytes_come_back_when_everything_is_cleared(units, seed, step_count):
    account = Account(units, random.Random(seed))
    for _ in range(step_count):
        account.step()
    account.window.clear()
    account.settle()
    assert account.freed == account.charged
    for _ in range(20):
        account.step()
    assert account.freed == account.charged

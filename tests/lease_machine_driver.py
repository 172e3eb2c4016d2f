"""Drives a lease machine over a store that answers at once. Time passes where the machine waits or the test says."""

import random

from anabranch._core.leases.machine import Held, LeaseMachine, Lost, MemberProfile
from anabranch._core.leases.plan import Drain
from anabranch._core.leases.store_calls import Answer, Describe, Description, Moment, NoAnswer, Wait
from anabranch._core.leases.timing import lease_timing
from anabranch._engine.fleet import send
from anabranch._model.leases import AppRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON
from anabranch.errors import LeaseStoreError
from anabranch.events import Event

APP = AppRow(app="billing", app_id="1", created_wall_ms=1)
STREAM = StreamRow(
    stream_key="1:orders:1", name="orders", arn="arn", created_seconds=1.0, origin=TRIM_HORIZON, bootstrapped=True
)
WALL_MS = 1_700_000_000_000


def now(coroutine):
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class Driver:
    def __init__(self, store, *, timing=None, **profile):
        self.store = store
        self.calls = []
        self.now_ms = 0
        self.changes = []
        self.described = Description()
        profile = {"worker_id": "w"} | profile
        self.machine = LeaseMachine(MemberProfile(**profile), timing or lease_timing(), random.Random(1))
        self.machine.app = now(store.open(APP))
        now(store.put_stream(STREAM))

    @property
    def moment(self):
        return Moment(self.now_ms, WALL_MS + self.now_ms)

    def begin(self, operation, *arguments, **options):
        """The steps of an operation that begins now."""
        self.machine.moment = self.moment
        return operation(*arguments, **options)

    def do(self, operation, *arguments, **options):
        """All steps of an operation of the machine."""
        steps, answer = self.begin(operation, *arguments, **options), None
        try:
            while True:
                action = steps.send(answer)
                answer = self.perform(action)
        except StopIteration as done:
            return done.value
        finally:
            self.changes += self.machine.take_changes()

    def perform(self, action):
        if isinstance(action, Wait):
            self.now_ms = max(self.now_ms, action.until_ms)
            value = None
        elif isinstance(action, Describe):
            value = self.described
        else:
            self.calls.append(action)
            try:
                value = now(send(self.store, action))
            except LeaseStoreError as error:
                value = NoAnswer(str(error))
        return Answer(value, self.moment)

    def join(self):
        self.do(self.machine.join, (STREAM.stream_key,))
        return self

    def round(self):
        self.do(self.machine.round)

    def beat(self):
        """One heartbeat of the current member."""
        heartbeat = self.machine.heartbeat
        heartbeat.wake(self.now_ms)
        steps = heartbeat.run(self.moment)
        action = next(steps, None)
        while action is not None and not isinstance(action, Wait):
            try:
                action = steps.send(self.perform(action))
            except StopIteration:
                return

    @property
    def held(self):
        return [change.holding for change in self.changes if isinstance(change, Held)]

    @property
    def lost(self):
        return [change.reason for change in self.changes if isinstance(change, Lost)]

    @property
    def requested(self):
        return [change.request for change in self.changes if isinstance(change, Drain)]

    def events(self, kind):
        return [change for change in self.changes if isinstance(change, Event) and isinstance(change, kind)]

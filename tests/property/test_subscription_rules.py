"""The laws of a subscription, whatever happens to it: it does not call too often, skips no record, and tries again."""

from random import Random

from hypothesis import given, strategies as st

from anabranch._core.reading.subscription import CALL_EVERY_MS, JITTER, POLLED_MS, Subscription
from anabranch._model.streams import TRIM_HORIZON, Position, StartingPosition, after_sequence_number

OUTCOMES = [
    "expired", "broken", "silent", "in_use", "throttled", "failed", "denied", "key_denied", "missing", "rejected",
]  # fmt: skip
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.sampled_from(OUTCOMES)),
        st.tuples(st.sampled_from(["accept", "event", "fill", "close", "poll"]), st.integers(1, 20)),
        st.tuples(st.just("wait"), st.integers(1, 100_000)),
    ),
    max_size=60,
)


class World:
    """Drives a subscription as the reader does."""

    def __init__(self):
        self.now_ms = 0
        self.subscription = Subscription("billing", 0)
        self.calls = []
        """The times of the SubscribeToShard calls."""
        self.read = None
        """The position of the last record that was read."""
        self.cursor = 0
        """The sequence number up to which the service has sent records in this subscription."""

    def act_as_reader(self):
        """Does what the reader would do next to get an active subscription, and waits for it if necessary."""
        subscription = self.subscription
        if subscription.is_due:
            self.now_ms = max(self.now_ms, subscription.due_at_ms)
            subscription.begin(self.now_ms)
            self.calls.append(self.now_ms)
            position = subscription.starting_position(
                self.read, after_sequence_number(self.read.sequence_number) if self.read else TRIM_HORIZON, TRIM_HORIZON
            )
            self.cursor = 0 if position.type == "TRIM_HORIZON" else int(position.sequence_number)
            assert self.cursor <= (self.read.sequence_number if self.read else 0), "it would skip records"
        elif subscription.state == "taken_over":
            self.now_ms += 1
            assert subscription.prove(self.now_ms, self.now_ms)
        elif subscription.state == "full":
            subscription.find_room(self.now_ms)
        elif subscription.state == "closed":
            subscription.open(self.now_ms)

    def perform(self, kind, argument):
        subscription = self.subscription
        match kind:
            case "wait":
                self.now_ms += argument
            case "end" if subscription.state in {"subscribing", "probing", "active"}:
                subscription.end(argument, "trouble", self.now_ms, Random(1))
            case "accept" if subscription.state in {"subscribing", "probing"}:
                subscription.accept(self.now_ms)
            case "event" if subscription.state == "active":
                # The event has the next records after the cursor. Its continuation is the last of them.
                last = self.cursor + argument
                if self.read is None or last > self.read.sequence_number:
                    self.read = Position(last)
                subscription.receive(str(last), self.now_ms)
                self.cursor = last
            case "poll" if subscription.is_polled:
                self.read = Position((self.read.sequence_number if self.read else 0) + argument)
            case "fill" if subscription.state == "active":
                subscription.fill()
            case "close":
                subscription.close()


@given(STEPS)
def test_the_service_is_called_at_most_once_a_second(steps):
    world = World()
    for step in steps:
        world.act_as_reader()
        world.perform(*step)
    assert all(later - earlier >= CALL_EVERY_MS for earlier, later in zip(world.calls, world.calls[1:], strict=False))


@given(STEPS)
def test_the_next_subscription_starts_after_the_last_record_read_or_at_the_checkpoint(steps):
    world = World()
    for step in steps:
        world.act_as_reader()
        world.perform(*step)
        subscription, read = world.subscription, world.read
        position = subscription.starting_position(
            read, after_sequence_number(read.sequence_number) if read else TRIM_HORIZON, TRIM_HORIZON
        )
        assert isinstance(position, StartingPosition)
        if position.type == "AFTER_SEQUENCE_NUMBER":
            assert read is not None
            assert int(position.sequence_number) == read.sequence_number


@given(STEPS)
def test_a_shard_without_a_subscription_always_subscribes_again_within_five_minutes(steps):
    world = World()
    for step in steps:
        world.act_as_reader()
        world.perform(*step)
    for _ in range(3):  # two moves are enough from every state: to waiting, then to subscribing
        before_ms = world.now_ms
        if world.subscription.state in {"subscribing", "probing", "active"}:
            return
        world.act_as_reader()
        assert world.now_ms - before_ms <= POLLED_MS * (1 + JITTER)
    assert world.subscription.state in {"subscribing", "probing"}

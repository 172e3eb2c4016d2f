"""The options of a harsh fleet, in addition to those of `simulate`."""

from typing import Literal

from anabranch.testing.world.options import FleetOptions

ConsumeMode = Literal["batches", "manual_ack", "records", "run", "run_batches"]
"""How a process consumes: `run` and `run_batches` call a handler; the others loop over records or batches."""

OVERRUN_SECONDS_MAX = 40.0
"""The longest that an overrunning handler call takes."""


class HarshOptions(FleetOptions, frozen=True, kw_only=True):
    order: Literal["shard", "key", "none"] = "shard"
    concurrency: int = 8
    record_count: int = 100
    key_count: int = 10
    consume_mode: ConsumeMode = "run"
    read: Literal["polling", "fanout"] = "polling"
    handler_seconds_max: float = 0.5
    aggregated: float = 0.0
    """Writes that are aggregates of up to five records."""
    failing: float = 0.0
    """Records whose first attempt, or first two, fail."""
    ends_at_tip: bool = False
    """Processes end at the tip of the stream, like batch jobs, and are started again."""
    undecodable: float = 0.0
    """Records that cannot be decoded while the faults last. They stop their shards; a process that starts later tries
    them again.
    """
    poison: float = 0.0
    """Records that can never be handled: their handler always fails, or in a loop, they do not decode. An operator goes
    past those at which a shard stops.
    """
    then: Literal["stop", "skip", "dead_letter"] = "stop"
    """What follows the last attempt."""
    handler_outage_every_seconds: float = 0.0
    """All handler calls fail for a few seconds."""
    letters_down_every_seconds: float = 0.0
    """The destination of dead letters gives no answer for a while."""
    overrunning: float = 0.0
    """Records whose first attempt takes far too long and does not end at once when cancelled."""
    timeout_seconds: float = 0.0
    """The timeout of a handler call; 0: none."""
    budget_bytes: int = 0
    """The byte budget beyond the reserve for one read; 0: the default budget."""
    tip_reserve_bytes: int = 0
    """With such a budget, what a read at the tip reserves; 0: as much as any other. If it is little, responses are
    larger than that.
    """
    unavailable: float = 0.0
    """Kinesis calls that fail with a 5xx status."""
    expired: float = 0.0
    """Reads that fail because the iterator expired. Subscriptions then last half a minute at most."""
    broken_streams: float = 0.0
    """Events of subscriptions at which the stream breaks inside a frame, falls silent, or ends with an error."""
    in_use: float = 0.0
    """Subscriptions that are refused because another one is active."""
    taken_over_every_seconds: float = 0.0
    """Somebody else subscribes to a random shard with the application's consumer."""
    consumer_deleted_every_seconds: float = 0.0
    """An operator deletes the application's consumer."""
    stall_every_seconds: float = 0.0
    """Like a pause, but heartbeats continue."""
    paused_starts: float = 0.0
    """Handler calls whose process is paused between the check of the fence and the call."""
    backlog: float = 0.0
    """Records that are written before the first process starts."""
    reshards_before: int = 0
    """How many times the stream is resharded before the first process starts, among a third of the records."""
    rescale_every_seconds: float = 0.0
    """UpdateShardCount is called."""
    trims: bool = False
    """About every 40 s the stream is trimmed: only records of the last half minute remain."""
    trims_unread: bool = False
    """Trims leave only the last few seconds, so some records are never read."""
    deleted: bool = False
    """The stream is deleted once, and created again a few seconds later."""
    listing_page: int = 0
    """Shards per page of ListShards: shards may change between two pages. 0: the service's default."""
    expiries_differ: bool = False
    """Each process has its own lease expiry."""
    store_outage_seconds: float = 0.0
    """How long the store is unreachable, once; 0: never."""
    roll_back_seconds: float = 0.0
    """How far the store is rolled back; 0: never."""
    roll_back_every_seconds: float = 0.0
    """0: it is rolled back once."""
    store_is_emptied: bool = False
    """The store is emptied once while the fleet is running."""
    row_deleted_every_seconds: float = 0.0
    """Somebody deletes a random lease row, if it is not the last one."""
    is_watched: bool = False
    """Somebody looks at the fleet all the time, as `anabranch top` does."""
    same_worker_id: bool = False
    """All processes are configured with one worker id."""
    hand_off: Literal["keep", "force"] = "keep"
    drain_seconds: float = 30.0
    """How long a hand-off waits for running calls."""

    @property
    def work_seconds(self) -> float:
        """An upper bound for all handler calls, one after another. `overrunning` is a mean: up to three times as many
        records may overrun.
        """
        attempts = 1 + 2 * self.failing
        return self.record_count * (attempts * self.handler_seconds_max + 3 * self.overrunning * OVERRUN_SECONDS_MAX)

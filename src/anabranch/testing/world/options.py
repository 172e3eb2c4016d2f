"""The options of a simulated fleet: sizes and faults."""

from typing import Final, Literal

import msgspec

APP: Final = "billing"
STREAM: Final = "orders"
ScriptAction = Literal["crash", "cut_off", "merge", "pause", "rescale", "split", "stop"]


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An `..._every_seconds` is the mean time between two such faults; 0: none. A fault of a process is counted per
    process. Fields without a unit are shares, from 0 to 1.
    """

    worker_count: int = 2
    shard_count: int = 2
    loop_order: Literal["fifo", "shuffle"] = "fifo"
    faulty_seconds: float = 40.0
    """How long records are written and faults occur."""
    script: tuple[tuple[float, ScriptAction], ...] = ()
    """Actions and the second of each, in addition to the random faults."""
    checkpoint_seconds: float = 1.0
    """The interval between two commits."""
    settling_seconds: float = 180.0
    """After the faults end, all records must be handled within this time plus half a second for each."""
    lost: float = 0.0
    """Requests that are lost, and responses."""
    late: float = 0.0
    """Requests and responses that take seconds."""
    repeated: float = 0.0
    """Requests that arrive twice."""
    throttled: float = 0.0
    """Kinesis calls that are throttled."""
    clock_error: float = 0.0
    """How much faster or slower a process's clock may run; 0.01 is 1 %."""
    clocks_stop: bool = False
    """The clock of a paused process stops."""
    pause_every_seconds: float = 0.0
    cut_off_every_seconds: float = 0.0
    """A process loses its connection to the store, the stream, or both."""
    crash_every_seconds: float = 0.0
    stop_every_seconds: float = 0.0
    """A graceful stop, followed by a new start."""
    reshard_every_seconds: float = 0.0

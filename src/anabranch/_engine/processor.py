"""Who handles the records: the runners of a handler (`Dispatcher`), or the caller's own loop (`iteration`).

The rest of the engine asks a processor which calls run, and tells it when to stop. The methods here are those of the
caller's own loop, which the engine can neither start nor cancel.
"""

from traceback import StackSummary

from anabranch._core.session import DeliveryMode, Session
from anabranch._engine.work_queue import WorkQueue
from anabranch.reasons import Reason
from anabranch.records import Record


class Processor:
    manual_ack = False
    """Whether the caller acknowledges each record."""
    is_loop = True
    """Whether the caller's own loop does the work."""
    is_cancellable = False
    """Whether running calls can be ended."""

    def __init__(self, queue: WorkQueue, mode: DeliveryMode) -> None:
        self.queue = queue
        self.mode = mode
        """How sessions deliver their records."""

    # what runs

    def running(self) -> list[tuple[Session, Record[bytes]]]:
        """Each running call, with its first record. The heartbeat thread asks, too."""
        return []

    def stack_of(self, record: Record[bytes]) -> StackSummary:  # noqa: ARG002 -- unknown here
        """Where in the code the call that starts with this record is."""
        return StackSummary()

    def overdue(self, now_ms: int) -> dict[Session, Reason]:  # noqa: ARG002 -- a loop has no timeout
        """Sessions with a call that ignores its timeout, each with the reason."""
        return {}

    @property
    def is_calling(self) -> bool:
        """Whether the code that asks runs inside a handler call."""
        return False

    def report_finished(self) -> Session | None:
        """Before each commit: a loop reports what is finished (rule M6), and returns the session, to be committed."""
        return None

    def abandon(self) -> tuple[Record[bytes], ...]:
        """The records that a loop holds will not be acknowledged: stops waiting for them. Returns those to report."""
        return ()

    # from start to end

    def start(self) -> None:
        """The worker has joined."""

    def interrupt(self, session: Session | None = None) -> None:
        """Cancels running calls, all or those of one session. Their records count as not started."""

    def revoke(self, session: Session) -> None:
        """The lease is lost: the session's calls no longer count."""
        self.queue.withdraw(session)

    def give_up(self) -> None:
        """Stops waiting for calls that cannot be cancelled."""

    def cancel_all(self) -> None:
        """The worker ends: cancels everything."""

    async def end(self) -> None:
        """Waits for cancelled calls, for a limited time."""

    def release(self) -> None:
        """Stops waiting for calls that ignore their cancellation."""

    def close(self) -> None:
        """The run is over."""

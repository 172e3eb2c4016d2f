"""What follows when a fence passes: running calls are interrupted, and those that outlive their grace are named.

Nothing is started by it, nor kept from starting: whoever starts a call compares the fence itself (rule L8). A later
acknowledgement may move the fence or lift it; so each time that is up is only a reason to look.
"""

from anabranch._engine.handling.sinks import Sink
from anabranch._engine.leases.member import Member
from anabranch._engine.outside import Outside
from anabranch._engine.scheduler import Scheduler
from anabranch._engine.session import Session
from anabranch._model.sequence_numbers import Position
from anabranch.events import ZombieCall
from anabranch.records import Record

__all__ = ["FenceWatch"]


class FenceWatch:
    def __init__(self, outside: Outside, scheduler: Scheduler, member: Member, sink: Sink) -> None:
        self._outside = outside
        self._scheduler = scheduler
        self._member = member
        self._sink = sink
        self._told: dict[tuple[Session, Position], None] = {}
        """Calls that were named and still run."""

    def note(self) -> None:
        """A heartbeat was answered."""
        valid_until_ms = self._member.heartbeat_status.fence.valid_until_ms
        if valid_until_ms is not None:
            self._scheduler.call_at(valid_until_ms, self._on_fence)

    def _on_fence(self) -> None:
        if self._member.may_start() or not self._sink.running():
            return
        self._sink.interrupt()
        self._scheduler.call_at(self._outside.clock.now_ms() + self._member.timing.grace_ms, self._on_grace_over)

    def _on_grace_over(self) -> None:
        """What still runs now may run beside the next owner's calls (rule L11)."""
        if not self._member.may_start():
            self.tell()

    def on_lost(self, session: Session) -> None:
        """The lease is another's. Handler calls are cancelled, and named if they outlive their grace; what the caller's
        own loop works on cannot be cancelled, and is named at once.
        """
        if self._sink.runner_count == 0:
            self.tell(session)
        elif any(owner is session for owner, _ in self._sink.running()):
            over_ms = self._outside.clock.now_ms() + self._member.timing.grace_ms
            self._scheduler.call_at(over_ms, lambda: self.tell(session))

    def tell(self, lost: Session | None = None) -> None:
        """Names the calls that run now, all of them or those of one session, each of them once."""
        running = self._sink.running()
        self._told = {call: None for session, record in running if (call := (session, record.position)) in self._told}
        for session, record in running:
            call = (session, record.position)
            if call not in self._told and (lost is None or session is lost):
                self._told[call] = None
                self._outside.emit(self._zombie(session, record))

    def zombies(self) -> list[ZombieCall]:
        """All calls that run now, as what they would be if their lease had lapsed."""
        return [self._zombie(session, record) for session, record in self._sink.running()]

    def _zombie(self, session: Session, record: Record[bytes]) -> ZombieCall:
        return ZombieCall(
            stream=session.stream.name,
            shard_id=session.shard_id,
            position=str(record.position),
            fence_token=session.row.fence_token,
            stack="".join(self._sink.stack_of(record).format()),
        )

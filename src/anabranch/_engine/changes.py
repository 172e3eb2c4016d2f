"""The sessions that changed in this turn of the event loop. Each is processed once, after the turn.

Readers, runners and iterators add sessions here and call no other part.
"""

from collections.abc import Callable

from anabranch._core.session import Session
from anabranch._engine.clock import Scheduler


class Changes:
    def __init__(self, scheduler: Scheduler, process: Callable[[Session, bool], None]) -> None:
        self._scheduler = scheduler
        self._process = process
        """Called for each changed session, and whether it may have new work."""
        self._sessions: dict[Session, bool] = {}

    def finished(self, session: Session) -> None:
        """Records finished, or a call ended."""
        if session not in self._sessions:
            self._add(session, has_work=False)

    def arrived(self, session: Session) -> None:
        """Records arrived, the shard ended, or a partial batch need not wait any more."""
        self._add(session, has_work=True)

    def _add(self, session: Session, *, has_work: bool) -> None:
        if not self._sessions:
            self._scheduler.call_soon(self._process_all)
        self._sessions[session] = has_work

    def _process_all(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session, has_work in sessions.items():
            self._process(session, has_work)

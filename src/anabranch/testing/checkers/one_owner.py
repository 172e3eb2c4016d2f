"""P4: a worker whose lease has lapsed starts nothing more, and fence tokens tell owners apart and only grow."""

from anabranch.testing.checkers.journal import Call, Checker

__all__ = ["OneOwner"]


class OneOwner(Checker):
    promise = "one owner"

    def __init__(self) -> None:
        super().__init__()
        self._highest: dict[str, Call] = {}
        """The call with the highest token of each key, over all shards of its line."""
        self._processes: dict[tuple[str, int], str] = {}

    def started(self, call: Call) -> None:
        before = self._highest.get(call.partition_key)
        if before is not None and call.fence_token < before.fence_token:
            self.complain(call.at_ms, f"stale dispatch: {call} starts after {before}")
            return
        self._highest[call.partition_key] = call
        owner = self._processes.setdefault((call.shard_id, call.fence_token), call.process)
        if owner != call.process:
            self.complain(call.at_ms, f"{call} starts with the token of {owner}")

    def store_went_back(self) -> None:
        """Tokens that were handed out and forgotten may be handed out again."""
        self._highest.clear()
        self._processes.clear()

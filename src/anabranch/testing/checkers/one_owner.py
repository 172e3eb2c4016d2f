"""P4: a worker whose lease has lapsed starts nothing more, and fence tokens tell owners apart and only grow.

A holding is one process's work on a shard with one fence token. Once another holding has started something of a shard,
an earlier one starts nothing more of it: whatever the tokens say, and whatever the store has forgotten.
"""

from anabranch.testing.checkers.journal import Call, Checker

__all__ = ["OneOwner"]

Holding = tuple[str, int]


class OneOwner(Checker):
    promise = "one owner"

    def __init__(self) -> None:
        super().__init__()
        self._holdings: dict[str, list[Holding]] = {}
        """Of each shard, in the order of their first starts."""
        self._tokens_grow = True
        self._highest: dict[str, Call] = {}
        """The call with the highest token of each key, over all shards of its line."""

    def started(self, call: Call) -> None:
        holding, holdings = (call.process, call.fence_token), self._holdings.setdefault(call.shard_id, [])
        if holding in holdings[:-1]:
            self.complain(call.at_ms, f"stale dispatch: {call} starts after {holdings[-1]} did")
            return
        if holding not in holdings:
            holdings.append(holding)
        if not self._tokens_grow:
            return
        before = self._highest.get(call.partition_key)
        if before is not None and call.fence_token < before.fence_token:
            self.complain(call.at_ms, f"the fence token goes back: {call} starts after {before}")
        elif before is not None and call.fence_token == before.fence_token and call.process != before.process:
            self.complain(call.at_ms, f"two owners with one fence token: {call} starts after {before}")
        self._highest[call.partition_key] = call

    def store_went_back(self) -> None:
        """Tokens that were handed out and then forgotten may be handed out again."""
        self._tokens_grow = False

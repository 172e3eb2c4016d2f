"""P5: what a consumer holds stays within its byte budget, and nothing of it is held after its end."""

from anabranch.testing.checkers.journal import Checker

__all__ = ["WithinBudget"]


class WithinBudget(Checker):
    promise = "within budget"

    def measured(self, at_ms: int, process: str, used_bytes: int, limit_bytes: int) -> None:
        if not 0 <= used_bytes <= limit_bytes:
            self.complain(at_ms, f"{process} holds {used_bytes} of {limit_bytes} bytes")

    def stopped(self, at_ms: int, process: str, used_bytes: int) -> None:
        if used_bytes:
            self.complain(at_ms, f"{process} has ended in order, and {used_bytes} bytes are not given back")

"""What an error says, in words that can be kept: handlers raise anything, and its text goes into a lease row.

A row must stay small, and stores keep text that is valid Unicode only. An error that cannot be written down would end
its worker instead of stopping its shard, and then the next owner.
"""

from typing import Final

__all__ = ["CHARACTERS_MAX", "error_text"]

CHARACTERS_MAX: Final = 1_000


def error_text(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- its text is the user's code, too
        return name
    text = text[:CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
    return f"{name}: {text}" if text else name

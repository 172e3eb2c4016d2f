"""Numbers as arguments: between two bounds, or refused with them."""

import argparse
from collections.abc import Callable
from typing import Final

__all__ = ["bounded_integer", "bounded_number", "positive_integer"]

_DIGITS_MAX: Final = 18


def bounded_number(noun: str, minimum: float, maximum: float) -> Callable[[str], float]:
    """A parser of texts like `0.5` that says `'x' is not a number of seconds from 1 to 3600` of others."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {noun} from {minimum:g} to {maximum:g}")
        return value

    return parse


def bounded_integer(noun: str, minimum: int, maximum: int) -> Callable[[str], int]:
    """The same for digits alone."""

    def parse(text: str) -> int:
        if not (_is_whole(text) and minimum <= int(text) <= maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {noun} from {minimum} to {maximum}")
        return int(text)

    return parse


def positive_integer(text: str) -> int:
    if not (_is_whole(text) and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX

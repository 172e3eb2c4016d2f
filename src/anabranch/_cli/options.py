"""Arguments and options that several commands share: AWS options, numbers, times, keys, sub-commands."""

import argparse
import datetime as dt
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

from anabranch._model.hash_keys import check_partition_key, parse_hash_key
from anabranch._model.streams import parse_stream, shard_index
from anabranch.config import Aws

Work = Callable[[argparse.Namespace], int | None]
"""Runs a command. Returns its exit code; None is 0."""

T = TypeVar("T")
N = TypeVar("N", int, float)


def bounded_number(noun: str, minimum: float, maximum: float) -> Callable[[str], float]:
    """Returns an argparse type for numbers within bounds; its error names the noun and the bounds."""
    return _bounded(float, minimum, maximum, f"a {noun} from {minimum:g} to {maximum:g}")


def bounded_integer(noun: str, minimum: int, maximum: int) -> Callable[[str], int]:
    """The same for whole numbers."""
    return _bounded(_whole, minimum, maximum, f"a {noun} from {minimum} to {maximum}")


def _bounded(convert: Callable[[str], N], minimum: float, maximum: float, wanted: str) -> Callable[[str], N]:
    def parse(text: str) -> N:
        with suppress(ValueError):
            if minimum <= (value := convert(text)) <= maximum:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


def _whole(text: str) -> int:
    """Digits only: `int` also accepts signs, spaces and underscores."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


positive_integer: Final = _bounded(_whole, 1, (1 << 31) - 1, "a whole number above 0")


_SPAN = re.compile(r"-?(\d+(?:\.\d+)?)([smhdw])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_ACCEPTED: Final = "-15m (also s, h, d, w) or an ISO time such as 2026-01-31T09:30Z"


def join_spans(words: list[str]) -> list[str]:
    """`--from -15m` becomes `--from=-15m`: argparse would read `-15m` as an option."""
    joined: list[str] = []
    for word in words:
        takes_value = bool(joined) and joined[-1].startswith("--") and len(joined[-1]) > 2 and "=" not in joined[-1]
        if takes_value and "--" not in joined and word.startswith("-") and _SPAN.fullmatch(word):
            joined[-1] = f"{joined[-1]}={word}"
        else:
            joined.append(word)
    return joined


def start_argument(text: str) -> Literal["latest", "trim_horizon"] | dt.datetime:
    word = text.lower().replace("-", "_")
    if word == "latest":
        return "latest"
    if word in {"horizon", "trim_horizon"}:
        return "trim_horizon"
    return _moment(text, accepted=f"horizon, latest, {_ACCEPTED}", if_future="to start now")


def end_argument(text: str) -> dt.datetime:
    return _moment(text, accepted=f"now, {_ACCEPTED}", if_future="and stop with Ctrl-C")


def _moment(text: str, *, accepted: str, if_future: str) -> dt.datetime:
    moment = now = dt.datetime.now(dt.UTC)
    try:
        if span := _SPAN.fullmatch(text):
            moment = now - dt.timedelta(seconds=float(span[1]) * _UNITS[span[2]])
        elif text.lower() != "now":
            moment = dt.datetime.fromisoformat(text).astimezone(dt.UTC)  # without a zone: local time
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write {accepted}") from None
    if moment > now:
        raise argparse.ArgumentTypeError(f"{text!r} is in the future; omit it {if_future}")
    return moment


def timestamp(seconds: float, precision: str = "milliseconds") -> str:
    """ISO 8601 in UTC."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def rate(records_per_second: float | None) -> str:
    if records_per_second is None:
        return "-"
    return f"{records_per_second:.1f}" if 0 < records_per_second < 10 else f"{records_per_second:.0f}"


def ago(seconds: float | None) -> str:
    """A duration in a few characters."""
    if seconds is None:
        return "-"
    for unit, length, limit in (("s", 1, 60), ("min", 60, 3_600), ("h", 3_600, 172_800)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"


class Actions:
    """Adds actions to a command. The help of an action shows those examples of the command that use it."""

    def __init__(self, parser: argparse.ArgumentParser, epilog: str) -> None:
        parser.epilog = epilog
        self._command = parser.prog
        self._lines = epilog.splitlines()
        self._parsers = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    def add(self, name: str, work: Work, summary: str) -> argparse.ArgumentParser:
        action = add_parser(self._parsers, name, summary)
        examples = [line for line in self._lines if line.startswith(f"  {self._command} {name}")]
        action.epilog = "\n".join(["examples:", *examples])
        action.set_defaults(work=work)
        return action


def add_parser(commands: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """The parser of one command or action. `commands` is what `add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An argparse type that shows the message of a ValueError."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


stream_argument: Final = argument(parse_stream)
hash_key_argument: Final = argument(parse_hash_key)
partition_key_argument: Final = argument(check_partition_key)


def add_aws_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("AWS options", "defaults come from the standard AWS environment and profile")
    group.add_argument("--region", help="such as eu-west-1 (AWS_REGION)")
    group.add_argument("--profile", help="of the shared AWS configuration files (AWS_PROFILE)")
    group.add_argument("--endpoint-url", metavar="URL", help="such as http://127.0.0.1:4567 (AWS_ENDPOINT_URL_KINESIS)")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_stream_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stream", type=stream_argument, metavar="STREAM", help="name or ARN of a stream")


def aws_from(arguments: argparse.Namespace) -> Aws:
    return Aws(region=arguments.region, profile=arguments.profile, endpoint_url=arguments.endpoint_url)


@argument
def shard_id_argument(text: str) -> str:
    """A shard id, or its number alone."""
    if text.isascii() and text.isdigit():
        return f"shardId-{int(text):012d}"
    try:
        shard_index(text)
    except ValueError as error:
        raise ValueError(f"{error}; its number alone is enough") from None
    return text


DEFAULT_LEASES: Final = "ANABRANCH_LEASES, else its file on this machine"


@argument
def application_argument(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not UTF-8") from None
    return text


def add_application_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "app", type=application_argument, metavar="APP", help="name of an application, as in Consumer(..., app=APP)"
    )
    add_leases_option(parser, "lease store of the application", default=DEFAULT_LEASES)


def add_leases_option(parser: argparse.ArgumentParser, what: str, *, default: str) -> None:
    parser.add_argument("--leases", metavar="URL", help=f"{what}, as in Consumer(..., leases=URL) (default: {default})")

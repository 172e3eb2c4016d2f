"""Arguments and options that several commands share: AWS options, numbers, times, keys, sub-commands."""

import argparse
import datetime as dt
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

from anabranch._model.hash_keys import check_partition_key, parse_hash_key
from anabranch._model.streams import parse_stream, shard_index
from anabranch.config import Aws

T = TypeVar("T")

_DIGITS_MAX: Final = 18


def bounded_number(noun: str, minimum: float, maximum: float) -> Callable[[str], float]:
    """Returns an argparse type for numbers within bounds; its error names the noun and the bounds."""

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
    """The same for whole numbers."""

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


Start = Literal["latest", "trim_horizon"] | dt.datetime

_SPAN = re.compile(r"-?(\d+(?:\.\d+)?)([smhdw])")
_SPAN_WORD = re.compile(r"-\d+(?:\.\d+)?[smhdw]")
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_STARTS: Final[dict[str, Literal["latest", "trim_horizon"]]] = {
    "latest": "latest",
    "horizon": "trim_horizon",
    "trim_horizon": "trim_horizon",
}
_ACCEPTED: Final = "-15m (also s, h, d, w) or an ISO time such as 2026-01-31T09:30Z"


def join_spans(words: list[str]) -> list[str]:
    """`--from -15m` becomes `--from=-15m`: argparse would read `-15m` as an option."""
    joined: list[str] = []
    for word in words:
        takes_value = bool(joined) and joined[-1].startswith("--") and len(joined[-1]) > 2 and "=" not in joined[-1]
        if takes_value and "--" not in joined and _SPAN_WORD.fullmatch(word):
            joined[-1] = f"{joined[-1]}={word}"
        else:
            joined.append(word)
    return joined


def start_argument(text: str) -> Start:
    word = text.lower().replace("-", "_")
    if word in _STARTS:
        return _STARTS[word]
    moment = _moment(text, f"horizon, latest, {_ACCEPTED}")
    if moment.timestamp() > time.time():
        raise argparse.ArgumentTypeError(f"{text!r} is in the future; omit it to start now")
    return moment


def end_argument(text: str) -> dt.datetime:
    moment = _moment(text, f"now, {_ACCEPTED}")
    if moment.timestamp() > time.time():
        raise argparse.ArgumentTypeError(f"{text!r} is in the future; omit it and stop with Ctrl-C")
    return moment


def _moment(text: str, accepted: str) -> dt.datetime:
    now = dt.datetime.now(dt.UTC)
    if text.lower() == "now":
        return now
    try:
        if span := _SPAN.fullmatch(text):
            return now - dt.timedelta(seconds=float(span[1]) * _UNITS[span[2]])
        return dt.datetime.fromisoformat(text).astimezone(dt.UTC)  # without a zone: local time
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write {accepted}") from None


def timestamp(seconds: float) -> str:
    """ISO 8601 in UTC, with milliseconds."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def lag(seconds: float | None) -> str:
    """A lag in a few characters."""
    return "-" if seconds is None else ago(seconds)


def rate(records_per_second: float) -> str:
    return f"{records_per_second:.1f}" if 0 < records_per_second < 10 else f"{records_per_second:.0f}"


def ago(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, length in (("min", 60), ("h", 3_600)):
        if seconds < 60 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d" if seconds >= 172_800 else f"{seconds / 3_600:.1f} h"


class Actions:
    """The actions of a command. Each has a function to run."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._command = parser.prog
        self._parsers = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    def add(
        self, name: str, work: Callable[[argparse.Namespace], int], summary: str, *, examples: Sequence[str] = ("",)
    ) -> argparse.ArgumentParser:
        """`examples` are what follows the action's name, for the epilog."""
        lines = [f"  {self._command} {name} {example}".rstrip() for example in examples]
        action = add_parser(self._parsers, name, summary)
        action.epilog = "\n".join(["example:" if len(lines) == 1 else "examples:", *lines])
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


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An argparse type that shows the message of a ValueError."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


stream_argument: Final = _argument(parse_stream)
hash_key_argument: Final = _argument(parse_hash_key)
partition_key_argument: Final = _argument(check_partition_key)


def add_aws_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("AWS options", "defaults come from the standard AWS environment and profile")
    group.add_argument("--region", help="such as eu-west-1 (AWS_REGION)")
    group.add_argument("--profile", help="of the shared AWS configuration files (AWS_PROFILE)")
    group.add_argument(
        "--endpoint-url",
        metavar="URL",
        help="another endpoint, such as a local server (AWS_ENDPOINT_URL_KINESIS)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_stream_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stream", type=stream_argument, metavar="STREAM", help="name or ARN of a stream")


def aws_from(arguments: argparse.Namespace) -> Aws:
    return Aws(region=arguments.region, profile=arguments.profile, endpoint_url=arguments.endpoint_url)


def shard_id_argument(text: str) -> str:
    """A shard id, or its number alone."""
    if text.isascii() and text.isdigit():
        return f"shardId-{int(text):012d}"
    try:
        shard_index(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; its number alone is enough") from None
    return text


DEFAULT_LEASES: Final = "ANABRANCH_LEASES, else its file on this machine"


def _check_app(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not UTF-8") from None
    return text


application_argument: Final = _argument(_check_app)


def add_application_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "app", type=application_argument, metavar="APP", help="name of an application, as in Consumer(..., app=APP)"
    )
    add_leases_option(parser, "lease store of the application", default=DEFAULT_LEASES)


def add_leases_option(parser: argparse.ArgumentParser, what: str, *, default: str) -> None:
    parser.add_argument("--leases", metavar="URL", help=f"{what}, as in Consumer(..., leases=URL) (default: {default})")

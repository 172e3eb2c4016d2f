"""`anabranch doctor`: is everything there that a consumer or a producer needs? Each line with what to do."""

import argparse
import asyncio
from typing import TYPE_CHECKING, Final

from anabranch._cli.aws_options import add_aws_options, add_json_option, aws_from, stream_argument
from anabranch._cli.fleet_options import add_leases_option
from anabranch._cli.outcomes import DONE, FAILED
from anabranch._cli.output import make_console, print_json, styled

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch._cli.checkup import Checkup, Finding

__all__ = ["add_arguments", "run"]

_EXAMPLES: Final = """\
examples:
  anabranch doctor
  anabranch doctor orders --profile production
  anabranch doctor orders --app billing --leases sqlite:///var/lib/billing.db
  anabranch doctor --json | jq '.[] | select(.state == "fail")'

Changes nothing in AWS. Ends with exit code 1 if something is in the way (fail);
what is only doubtful (warn) or was not looked at (skip) does not count.
"""
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "stream", nargs="?", type=stream_argument, metavar="STREAM",
        help="also check this stream, and what may be done with it",
    )  # fmt: skip
    parser.add_argument("--app", metavar="NAME", help="an application, to check its lease store")
    add_leases_option(parser, "its lease store", default="its file on this machine")
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from anabranch._cli.checkup import Checkup

    checkup = Checkup(aws_from(arguments), stream=arguments.stream, app=arguments.app, leases=arguments.leases)
    console = None if arguments.json else make_console()
    findings = asyncio.run(_examine(checkup, console))
    if arguments.json:
        print_json(findings)
    return FAILED if any(finding.state == "fail" for finding in findings) else DONE


async def _examine(checkup: "Checkup", console: "Console | None") -> list["Finding"]:
    """Lines are shown as they come: some checks take their time."""
    findings: list[Finding] = []
    async for finding in checkup.findings():
        findings.append(finding)
        if console is not None:
            line = styled("").append(f"{finding.state:<5}", _STYLES[finding.state])
            console.print(line.append(f"{finding.check:<12}", "bold").append(finding.finding), soft_wrap=True)
            if finding.advice is not None:
                console.print(styled(f"{'':17}-> {finding.advice}"), soft_wrap=True)
    return findings

"""The options of commands that look at an application: its name, and where its leases are."""

import argparse

__all__ = ["add_application_argument", "add_leases_option"]


def add_application_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", metavar="APP", help="name of an application, as in Consumer(..., app=APP)")
    add_leases_option(parser, "its lease store", default="its file on this machine")


def add_leases_option(parser: argparse.ArgumentParser, what: str, *, default: str) -> None:
    parser.add_argument("--leases", metavar="URL", help=f"{what}, as in Consumer(..., leases=URL) (default: {default})")

"""The options that every command shares: which AWS to talk to, and whether a program reads the output.

They have the AWS CLI's names. What is left out comes from the standard chain: environment, profile, container,
instance.
"""

import argparse

from anabranch._model.hash_keys import check_partition_key, parse_hash_key
from anabranch._model.shards import shard_index
from anabranch._model.streams import StreamName, parse_stream
from anabranch.config import Aws

__all__ = [
    "add_aws_options",
    "add_json_option",
    "add_stream_argument",
    "aws_from",
    "hash_key_argument",
    "partition_key_argument",
    "shard_id_argument",
    "stream_argument",
]


def add_aws_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("AWS options", "what is left out comes from the standard environment and profile")
    group.add_argument("--region", help="such as eu-west-1 (AWS_REGION)")
    group.add_argument("--profile", help="of the shared AWS configuration files (AWS_PROFILE)")
    group.add_argument(
        "--endpoint-url",
        metavar="URL",
        help="another address, such as a local one (AWS_ENDPOINT_URL_KINESIS)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_stream_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stream", type=stream_argument, metavar="STREAM", help="name or ARN of a stream")


def aws_from(arguments: argparse.Namespace) -> Aws:
    return Aws(region=arguments.region, profile=arguments.profile, endpoint_url=arguments.endpoint_url)


def stream_argument(text: str) -> StreamName:
    try:
        return parse_stream(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shard_id_argument(text: str) -> str:
    """A shard's id, or only its number."""
    if text.isascii() and text.isdigit():
        return f"shardId-{int(text):012d}"
    try:
        shard_index(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; its number alone will do") from None
    return text


def hash_key_argument(text: str) -> int:
    try:
        return parse_hash_key(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def partition_key_argument(text: str) -> str:
    try:
        return check_partition_key(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

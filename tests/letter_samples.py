"""Letters for tests, and AWS's SQS and S3 as moto plays them."""

import contextlib
import os

import boto3

from anabranch.letters import Failure, make_letter
from anabranch.records import Record

from services import moto_dynamodb

AWS_NAMES = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "eu-west-1"}
CREATED = 1_700_000_000.0


def a_letter(number=1, *, key="anna", app="billing", stream="orders", payload=None, message="bad", kind="ValueError"):
    """The letter of record `number` of the stream."""
    data = b"payload %d" % number if payload is None else payload
    record = Record(
        stream=stream, shard_id="shardId-000000000000", sequence_number=str(number), partition_key=key,
        arrival_seconds=CREATED + number, data=data,
    )  # fmt: skip
    return make_letter(
        app=app, stream=stream, stream_created_seconds=CREATED, shard_id=record.shard_id,
        sequence_number=record.sequence_number, sub_sequence_number=-1, record=record,
        failure=Failure(error_type=kind, message=message, stack="Traceback", fingerprint=kind.lower()),
        attempts=3, attempted_seconds=(1.0, 2.0, 3.0), written_seconds=CREATED + 100 + number,
    )  # fmt: skip


class MotoServer:
    """moto's SQS and S3 on a loopback port; `environment` leads the SDKs of a process there."""

    def __init__(self, url):
        self.url = url
        self.environment = {**AWS_NAMES, "AWS_ENDPOINT_URL_SQS": url, "AWS_ENDPOINT_URL_S3": url}

    def client(self, service):
        return boto3.client(
            service, region_name="eu-west-1", endpoint_url=self.url, aws_access_key_id="x", aws_secret_access_key="y"
        )

    def make_queue(self, name, **attributes):
        if name.endswith(".fifo"):
            attributes["FifoQueue"] = "true"
        self.client("sqs").create_queue(QueueName=name, Attributes=attributes)
        return f"sqs://{name}?endpoint={self.url}&region=eu-west-1"

    def make_bucket(self, name):
        self.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        return f"s3://{name}/letters?endpoint={self.url}&region=eu-west-1"


@contextlib.contextmanager
def moto():
    with moto_dynamodb() as server:
        yield MotoServer(server.url)


@contextlib.contextmanager
def environment(values):
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

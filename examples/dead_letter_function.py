"""A function behind an SQS trigger: retries dead letters with growing pauses, and sends what keeps failing to review.

Set `ReportBatchItemFailures` on the trigger. SQS delivers a message again when it becomes visible, so the pause before
the next attempt is its visibility timeout. With a FIFO queue set the batch size to 1.
"""

import os

import boto3

import anabranch
from anabranch.letters import Failure, decode_letter, encode_letter, make_letter

ATTEMPTS = 3
PAUSE_SECONDS = 30


def charge(record: anabranch.Record[bytes]) -> None:
    """What your consumer's handler does."""
    print(f"charged {int(record.data)} to {record.partition_key}")


def handler(event: dict, context: object) -> dict:  # noqa: ARG001 -- how Lambda calls it
    sqs = boto3.client("sqs")
    kept = []
    for message in event["Records"]:
        try:
            charge(decode_letter(message["body"]).record())
        except Exception as error:  # noqa: BLE001 -- whatever it is, the message is kept
            calls = int(message["attributes"]["ApproximateReceiveCount"])
            if calls >= ATTEMPTS:  # sent first: SQS deletes the message when this function returns
                sqs.send_message(QueueUrl=os.environ["REVIEW_QUEUE_URL"], MessageBody=message["body"])
                print(f"message {message['messageId']} needs a person: {error}")
                continue
            sqs.change_message_visibility(
                QueueUrl=os.environ["QUEUE_URL"],
                ReceiptHandle=message["receiptHandle"],
                VisibilityTimeout=PAUSE_SECONDS * 2 ** (calls - 1),
            )
            kept.append({"itemIdentifier": message["messageId"]})
    return {"batchItemFailures": kept}


if __name__ == "__main__":
    record = anabranch.Record(
        stream="orders", shard_id="shardId-000000000000", sequence_number="1", partition_key="customer-1",
        arrival_seconds=0.0, data=b"41",
    )  # fmt: skip
    letter = make_letter(
        app="billing", stream="orders", stream_created_seconds=0.0, shard_id=record.shard_id, sequence_number="1",
        sub_sequence_number=-1, record=record, failure=Failure.of(TimeoutError("no bank")), attempts=3,
        written_seconds=0.0,
    )  # fmt: skip
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    print(handler({"Records": [{"messageId": "1", "body": encode_letter(letter).decode()}]}, None))

"""A function behind a Kinesis trigger: it sees the records that were written, aggregated or not."""

import base64

import anabranch


def handler(event: dict, context: object) -> int:  # noqa: ARG001 -- how Lambda calls it
    total = 0
    for record in anabranch.deaggregate(event, decode=int):
        total += record.value
    return total


if __name__ == "__main__":
    data = base64.b64encode(b"41").decode()
    part = {"data": data, "partitionKey": "customer-1", "sequenceNumber": "1", "approximateArrivalTimestamp": 1.0}
    print(f"total {handler({'Records': [{'kinesis': part}]}, None)}")

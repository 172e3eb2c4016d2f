"""Workers that share leases in DynamoDB, and write each result once, by a condition on the row.

Here two consumers run in one program; in production each is a process on a machine of its own, with the same code.
AWS_ENDPOINT_URL_DYNAMODB names another DynamoDB, such as DynamoDB Local.
"""

import asyncio
from typing import Any

from botocore.exceptions import ClientError
from botocore.session import Session

import anabranch

dynamodb = Session().create_client("dynamodb")
applied = repeated = 0


def create_results() -> None:
    key: dict[str, Any] = {"AttributeName": "id", "AttributeType": "S"}
    dynamodb.create_table(
        TableName="results",
        AttributeDefinitions=[key],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )


def apply(record: anabranch.Record[bytes]) -> None:
    """A plain function runs in a thread. The id of a record is the same in every attempt and every worker."""
    global applied, repeated  # noqa: PLW0603 -- the example counts
    key = f"{record.shard_id}:{record.sequence_number}:{record.sub_sequence_number}"
    try:
        dynamodb.put_item(
            TableName="results",
            Item={"id": {"S": key}, "data": {"B": record.data}},
            ConditionExpression="attribute_not_exists(id)",
        )
        applied += 1
    except ClientError as error:
        if error.response["Error"]["Code"] != "ConditionalCheckFailedException":
            raise
        repeated += 1


async def main() -> None:
    create_results()
    async with anabranch.Producer("orders") as producer:
        await producer.put_many((f"customer-{number % 20}", str(number).encode()) for number in range(100))
    workers = [
        anabranch.Consumer("orders", app="fleet", leases="dynamodb://", order="key", idle_timeout=4) for _ in range(2)
    ]
    reports = await asyncio.gather(*(worker.run(apply) for worker in workers))
    print(f"{applied} results, {repeated} repeats refused, clean stops: {all(report.clean for report in reports)}")


asyncio.run(main())

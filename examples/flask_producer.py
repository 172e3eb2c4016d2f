"""A Flask service that writes orders from its threads: a `SyncProducer` needs no event loop."""

from flask import Flask, request
from flask.typing import ResponseReturnValue

import anabranch

app = Flask(__name__)
producer = anabranch.SyncProducer("orders", encode=dict, linger=0.01)


@app.post("/orders")
def create() -> ResponseReturnValue:
    order = request.get_json()
    result = producer.put_and_wait(order, order["customer"])
    return {"shard": result.shard_id, "sequence_number": result.sequence_number}, 202


if __name__ == "__main__":
    client = app.test_client()
    answers = [client.post("/orders", json={"customer": f"c-{number}", "amount": 1}) for number in range(20)]
    producer.close()
    print(f"accepted {sum(answer.status_code == 202 for answer in answers)} orders")

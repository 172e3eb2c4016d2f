"""A FastAPI service that writes orders: one producer for the whole program, closed when the server stops.

uvicorn fastapi_producer:app
"""

import json
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

import anabranch

producer = anabranch.Producer("orders", encode=dict, linger=0.01)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with producer:  # the end delivers what is buffered
        yield


app = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    customer: str
    amount: int


@app.post("/orders", status_code=202)
async def create(order: Order) -> dict[str, str | None]:
    """Answers when the order is in the stream. Requests that come together share one call to Kinesis."""
    result = await producer.put_and_wait(order.model_dump(), order.customer)
    return {"shard": result.shard_id, "sequence_number": result.sequence_number}


def try_it(server: uvicorn.Server) -> int:
    """Sends twenty orders, and returns how many were accepted."""
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    accepted = 0
    for number in range(20):
        body = json.dumps({"customer": f"c-{number}", "amount": 1}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/orders", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:  # noqa: S310 -- this machine
            accepted += answer.status == 202
    return accepted


if __name__ == "__main__":
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    print(f"accepted {try_it(server)} orders")
    server.should_exit = True
    thread.join()

"""Clients: each sends the hands of one session over a WebSocket, and keeps the letters that come back.

An answer may come twice, because nothing is lost in a crash. `Session.accept` drops repeats by number, and checks that
what it accepts is in order.
"""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from hands import LETTERS, sample

POISON_EVERY = 199
"""One hand in this many is invalid: the model fails at every attempt."""
TIMEOUT_EVERY = 139
"""For one hand in this many, the model has a simulated timeout."""


@dataclass
class Session:
    """One session: what was sent, and what came back."""

    session_id: str
    sent: dict[int, str] = field(default_factory=dict)
    """The letter that was signed, by the number of the hand."""
    answered: dict[int, str] = field(default_factory=dict)
    redriven: set[int] = field(default_factory=set)
    last_number: int = -1
    right_count: int = 0
    repeat_count: int = 0
    disorder: list[int] = field(default_factory=list)
    """Numbers that came after a later one, which is allowed only for redriven answers."""
    latencies_ms: list[float] = field(default_factory=list)

    def accept(self, answer: dict) -> None:
        number = answer["number"]
        if number in self.answered:
            self.repeat_count += 1
            return
        self.answered[number] = answer["letter"]
        self.right_count += answer["letter"] == self.sent.get(number)
        if answer["redriven"]:
            self.redriven.add(number)
            return
        if number < self.last_number:
            self.disorder.append(number)
        self.last_number = number
        self.latencies_ms.append((time.time() - answer["sent_at"]) * 1000)

    @property
    def unanswered(self) -> set[int]:
        return self.sent.keys() - self.answered.keys()


class Clients:
    """Several sessions, each with a socket of its own, that together send `rate` hands a second."""

    def __init__(self, url: str, *, count: int, rate: float, seed: int = 0, poison: bool = True) -> None:
        self.sessions = [Session(f"session-{seed}-{number}") for number in range(count)]
        self._url = url
        self._interval = count / rate
        self._poison = poison
        random = np.random.default_rng(seed)
        self._hands = [(letter, sample(letter, random).round(4).tolist()) for letter in LETTERS * 8]
        self._stopping = asyncio.Event()
        self.errors: list[str] = []

    async def run(self) -> None:
        """Sends until `stop_sending` is called, and receives until it is cancelled."""
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
            for number, session in enumerate(self.sessions):
                delay = number * self._interval / len(self.sessions)
                tasks.create_task(self._run_one(http, session, number, delay))

    def stop_sending(self) -> None:
        self._stopping.set()

    @property
    def sent_count(self) -> int:
        return sum(len(session.sent) for session in self.sessions)

    @property
    def answered_count(self) -> int:
        return sum(len(session.answered) for session in self.sessions)

    async def _run_one(self, http: aiohttp.ClientSession, session: Session, offset: int, delay: float) -> None:
        async with http.ws_connect(f"{self._url}/ws") as socket, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(socket, session, offset, delay))
            async for message in socket:
                content = json.loads(message.data)
                if isinstance(content, dict):
                    self.errors.append(f"{session.session_id} {content['number']}: {content['error']}")
                    continue
                for answer in content:
                    session.accept(answer)

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, session: Session, offset: int, delay: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        for number in itertools.count():
            if self._stopping.is_set():
                return
            letter, landmarks = self._hands[(number + 7 * offset) % len(self._hands)]
            message = {"session_id": session.session_id, "number": number, "landmarks": landmarks}
            count = number * len(self.sessions) + offset
            if self._poison and count % POISON_EVERY == POISON_EVERY - 1:
                message["simulate"] = "poison"
            elif self._poison and count % TIMEOUT_EVERY == TIMEOUT_EVERY - 1:
                message["simulate"] = "timeout"
            session.sent[number] = letter
            await socket.send_str(json.dumps({**message, "sent_at": time.time()}))
            due += self._interval
            await asyncio.sleep(max(0.0, due - loop.time()))

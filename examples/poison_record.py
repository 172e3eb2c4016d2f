"""A poison record goes to the dead letters, while the others are handled. After a fix, a redrive delivers it."""

import asyncio
import tempfile
from pathlib import Path

import anabranch

handled: list[int] = []
is_fixed = False


async def charge(record: anabranch.Record[bytes]) -> None:
    number = int(record.data)
    if number == 41 and not is_fixed:
        raise ValueError("this order has no price")
    handled.append(number)


async def main() -> None:
    global is_fixed  # noqa: PLW0603 -- as a deployment would fix it
    letters = f"sqlite:///{Path(tempfile.mkdtemp()) / 'letters.db'}"
    async with anabranch.Producer("orders") as producer:
        await producer.put_many((f"customer-{number % 5}", str(number).encode()) for number in range(100))
    policy = anabranch.Retry(attempts=2, backoff=0.01, then=anabranch.DeadLetter(letters))
    await anabranch.Consumer("orders", app="charges", until="tip", on_failure=policy).run(charge)
    print(f"handled {len(handled)}, and {41 in handled = }")

    is_fixed = True
    async with anabranch.DeadLetters(letters) as dead:
        async for letter in dead.letters():
            print(f"{letter.partition_key}: {letter.error_type}: {letter.message}")
        await dead.redrive(charge)
    print(f"handled {len(handled)} of 100 after the redrive, each once: {sorted(handled) == list(range(100))}")


asyncio.run(main())

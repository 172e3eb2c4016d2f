"""Credentials for signing: found and refreshed by botocore in a thread, ahead of their expiry, while calls go on with
what there is.

botocore's refreshable credentials renew themselves when asked within fifteen minutes of their end. So they are asked
once a minute: what is in use has at least a good ten minutes to live. Only the first call, a call after a long pause,
and a call that the service refused for expired credentials wait for the thread.

One source may serve several event loops: what it hands out is immutable and swapped in one step.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from anabranch._wire.sigv4 import SigningCredentials
from anabranch.errors import CredentialsError, UsageError

__all__ = ["CredentialSource", "frozen_credentials"]

logger = logging.getLogger("anabranch.aws")

_ASK_AGAIN_SECONDS: Final = 60.0
_ASK_AFTER_FAILURE_SECONDS: Final = 10.0
_TRUSTED_SECONDS: Final = 300.0  # older than this, credentials are asked for before they are used

NO_CREDENTIALS: Final = (
    "no AWS credentials: run `aws configure` or `aws sso login`, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "name another profile (--profile, Aws(profile=...)) or session (Aws(session=...)); web identity, container and "
    "instance role have none either"
)


class CredentialSource:
    def __init__(self, find: Callable[[bool], Any], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`find` blocks and returns botocore's credentials or None; asked to look anew, it forgets what it has read."""
        self._find = find
        self._monotonic = monotonic
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="anabranch-credentials")
        self._lock = threading.Lock()
        self._asking: Future[SigningCredentials] | None = None
        self._found: Any = None
        self._current: SigningCredentials | None = None
        self._found_at = 0.0
        self._ask_at = 0.0
        self._closed = False

    def current(self) -> SigningCredentials | None:
        """What to sign with now, without waiting; None where `get` has to be awaited."""
        now = self._monotonic()
        if now >= self._ask_at:
            if self._current is None or now - self._found_at >= _TRUSTED_SECONDS:
                return None
            self._ask(anew=False)
        return self._current

    async def get(self) -> SigningCredentials:
        current = self.current()
        return current if current is not None else await asyncio.wrap_future(self._ask(anew=False))

    async def renew(self, refused: SigningCredentials) -> SigningCredentials:
        """Others than those that the service refused, if there are any."""
        if self._current is not None and self._current != refused:
            return self._current
        return await asyncio.wrap_future(self._ask(anew=True))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, *, anew: bool) -> Future[SigningCredentials]:
        """One question at a time: who comes in the meantime shares its answer."""
        with self._lock:
            if self._closed:
                raise UsageError("this client is closed")
            if self._asking is None or self._asking.done():
                self._asking = self._thread.submit(self._read, anew=anew)
            return self._asking

    def _read(self, *, anew: bool) -> SigningCredentials:
        """In the thread."""
        try:
            if self._found is None or anew:
                self._found = self._find(anew)
            found = frozen_credentials(self._found)
        except CredentialsError as error:
            self._ask_at = self._monotonic() + _ASK_AFTER_FAILURE_SECONDS
            if self._current is not None:
                logger.warning("AWS credentials were not refreshed, the present ones stay in use: %s", error)
            raise
        current = self._current
        if current is None or found != current:
            current = self._current = found  # else the same object stays: signers are kept by identity
        self._found_at = self._monotonic()
        self._ask_at = self._found_at + _ASK_AGAIN_SECONDS
        return current


def frozen_credentials(found: Any) -> SigningCredentials:
    """The credentials at this moment, refreshed if their end is near. Blocks."""
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- botocore is loaded when first needed

    if found is None:
        raise CredentialsError(NO_CREDENTIALS)
    try:
        frozen = found.get_frozen_credentials() if hasattr(found, "get_frozen_credentials") else found
    except (BotoCoreError, RuntimeError, OSError) as error:
        raise CredentialsError(f"the AWS credentials could not be fetched or refreshed: {error}") from error
    if not frozen.access_key or not frozen.secret_key:
        raise CredentialsError(NO_CREDENTIALS)
    return SigningCredentials(frozen.access_key, frozen.secret_key, frozen.token or None)

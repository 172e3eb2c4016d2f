"""Credentials for signing: botocore finds and refreshes them in a thread, before they expire, while calls continue.

botocore renews refreshable credentials if they are read in their last fifteen minutes. We read them once a minute, so
the credentials in use are valid for at least ten more minutes. A call waits for the thread only if it is the first one,
if it follows a long pause, or if the service refused its credentials as expired.

One source may serve several event loops: the credentials are immutable and replaced in one step.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from anabranch._daemon_threads import DaemonThreads
from anabranch._wire.sigv4 import SigningCredentials
from anabranch.errors import CredentialsError, UsageError

logger = logging.getLogger("anabranch.aws")

_READ_AGAIN_SECONDS: Final = 60.0
_READ_AFTER_FAILURE_SECONDS: Final = 10.0
_AGE_SECONDS_MAX: Final = 300.0  # credentials older than this are read again before use

NO_CREDENTIALS: Final = (
    "no AWS credentials: run `aws configure` or `aws sso login`, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "choose another profile (--profile, Aws(profile=...)) or session (Aws(session=...)). Web identity, container and "
    "instance roles were tried too"
)


class CredentialSource:
    def __init__(
        self, find: Callable[[bool], Any], thread: DaemonThreads, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`find(fresh)` returns botocore's credentials or None. It blocks, so it is called in `thread`. `fresh` means:
        read all sources again.
        """
        self._find = find
        self._thread = thread
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._reading: Future[SigningCredentials] | None = None
        self._found: Any = None
        self._current: SigningCredentials | None = None
        self._found_at = 0.0
        self._read_at = 0.0

    def current(self) -> SigningCredentials | None:
        """The credentials to sign with now, without waiting; None if `get` must be awaited."""
        now = self._monotonic()
        if now >= self._read_at:
            if self._current is None or now - self._found_at >= _AGE_SECONDS_MAX:
                return None
            self._start_read(fresh=False)
        return self._current

    async def get(self) -> SigningCredentials:
        current = self.current()
        return current if current is not None else await asyncio.wrap_future(self._start_read(fresh=False))

    async def renew(self, refused: SigningCredentials) -> SigningCredentials:
        """Credentials that replace the refused ones, if there are any."""
        if self._current is not None and self._current != refused:
            return self._current
        return await asyncio.wrap_future(self._start_read(fresh=True))

    def _start_read(self, *, fresh: bool) -> Future[SigningCredentials]:
        """One read at a time; concurrent callers share its result."""
        with self._lock:
            if self._reading is None or self._reading.done():
                try:
                    self._reading = self._thread.submit(self._read, fresh=fresh)
                except RuntimeError:
                    raise UsageError("this client is closed") from None
            return self._reading

    def _read(self, *, fresh: bool) -> SigningCredentials:
        """Runs in the thread."""
        try:
            if self._found is None or fresh:
                self._found = self._find(fresh)
            found = frozen_credentials(self._found)
        except CredentialsError as error:
            self._read_at = self._monotonic() + _READ_AFTER_FAILURE_SECONDS
            if self._current is not None:
                logger.warning("cannot refresh the AWS credentials, keeping the current ones: %s", error)
            raise
        current = self._current
        if current is None or found != current:
            current = self._current = found  # else keep the same object: signers are cached by identity
        self._found_at = self._monotonic()
        self._read_at = self._found_at + _READ_AGAIN_SECONDS
        return current


def frozen_credentials(found: Any) -> SigningCredentials:
    """The current credentials, refreshed if they expire soon. Blocks."""
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- botocore is loaded when first needed

    if found is None:
        raise CredentialsError(NO_CREDENTIALS)
    try:
        frozen = found.get_frozen_credentials() if hasattr(found, "get_frozen_credentials") else found
    except (BotoCoreError, RuntimeError, OSError) as error:
        raise CredentialsError(f"cannot fetch or refresh the AWS credentials: {error}") from error
    if not frozen.access_key or not frozen.secret_key:
        raise CredentialsError(NO_CREDENTIALS)
    return SigningCredentials(frozen.access_key, frozen.secret_key, frozen.token or None)

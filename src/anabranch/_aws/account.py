"""What `Aws` stands for, resolved by botocore: region, endpoints, certificates, credentials.

botocore reads files, asks metadata services and imports a great deal: all of that happens in one thread of its own,
when first needed. An account may be shared by clients of several event loops.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from anabranch._aws.credentials import CredentialSource, frozen_credentials
from anabranch._aws.endpoints import ServiceAddress, resolve_address, resolve_region
from anabranch._aws.sessions import botocore_session
from anabranch.config import Aws
from anabranch.errors import CredentialsError, UsageError

__all__ = ["AwsAccount"]

T = TypeVar("T")


class AwsAccount:
    def __init__(self, aws: Aws | None = None) -> None:
        self.aws = aws or Aws()
        self.credentials = CredentialSource(self._find_credentials)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="anabranch-aws")
        self._kept_session: Any = None

    async def address(self, service: str, *, region: str | None = None) -> ServiceAddress:
        """`region` is what the caller knows better than the chain, from a stream's ARN."""
        return await self._in_thread(lambda: resolve_address(self._session(), self.aws, service, region))

    async def client(self, service: str, *, region: str | None = None) -> Any:
        """A botocore client for rare calls. It blocks, so it is called in threads."""
        return await self._in_thread(lambda: self._client(service, region))

    def close(self) -> None:
        self.credentials.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            pending = self._thread.submit(work)
        except RuntimeError:
            raise UsageError("this client is closed") from None
        return await asyncio.wrap_future(pending)

    # In a thread

    def _session(self) -> Any:
        if self._kept_session is None:
            self._kept_session = botocore_session(self.aws)
        return self._kept_session

    def _find_credentials(self, anew: bool) -> Any:  # noqa: FBT001 -- the source's one question
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- botocore is loaded when first needed

        if self.aws.credentials is not None:
            return self.aws.credentials
        # A session reads files and variables once: what another program has renewed since is found by a new one.
        session = botocore_session(self.aws) if anew and self.aws.session is None else self._session()
        try:
            return session.get_credentials()
        except BotoCoreError as error:
            raise CredentialsError(f"the AWS credentials cannot be found: {error}") from error

    def _client(self, service: str, region: str | None) -> Any:
        from botocore.config import Config  # noqa: PLC0415 -- as above

        session = self._session()
        given: dict[str, str | None] = {}
        if self.aws.credentials is not None:
            frozen = frozen_credentials(self.aws.credentials)
            given = {
                "aws_access_key_id": frozen.access_key_id,
                "aws_secret_access_key": frozen.secret_access_key,
                "aws_session_token": frozen.session_token,
            }
        # `endpoint_url` is Kinesis's: other services have their own variables and their own section of the profile.
        endpoint_url = self.aws.endpoint_url if service == "kinesis" else None
        region_name = resolve_region(session, self.aws, region)
        once = Config(retries={"total_max_attempts": 1})  # whoever calls decides about trying again
        return session.create_client(service, region_name=region_name, endpoint_url=endpoint_url, config=once, **given)

"""What `Aws` stands for, resolved by botocore: region, endpoints, certificates, credentials.

botocore reads files, asks metadata services and imports a great deal: all of that happens in one thread of its own,
when first needed. An account may be shared by clients of several event loops.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from anabranch._aws.credentials import CredentialSource, frozen_credentials
from anabranch._aws.endpoints import ServiceAddress, configured_region, resolve_address, resolve_region
from anabranch._aws.sessions import botocore_session
from anabranch._model.streams import StreamName
from anabranch.config import Aws
from anabranch.errors import ConfigurationError, CredentialsError, UsageError

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

    async def common_region(self, streams: Sequence[StreamName]) -> str | None:
        """Where one client finds all these streams: the region that the ARNs among them name; None: the configured one.

        A stream given by its name is in the configured region. Where that is not the ARNs', one of the two would be
        looked for in the wrong place, and there another stream may have that name.
        """
        by_arn = {stream.region: str(stream) for stream in streams if stream.region is not None}
        by_name = [stream.name for stream in streams if stream.region is None]
        if by_arn and by_name:
            configured = await self._in_thread(lambda: configured_region(self._session(), self.aws))
            if configured is not None:
                by_arn.setdefault(configured, by_name[0])
        if len(by_arn) > 1:
            places = ", ".join(f"{stream} in {region}" for region, stream in sorted(by_arn.items()))
            raise ConfigurationError(
                f"the streams of one consumer must be in one region, not {places}: use a consumer for each region, or "
                "give the ARN of every stream"
            )
        return next(iter(by_arn), None)

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

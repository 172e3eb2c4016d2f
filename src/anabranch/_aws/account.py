"""Resolves `Aws` settings with botocore: session, region, endpoints, certificates, credentials.

botocore reads files, calls metadata services and is slow to import. So it runs in a thread, from when it is first
needed. Clients of several event loops may share an account.

The endpoint comes from `Aws(endpoint_url=...)`, AWS_ENDPOINT_URL_KINESIS, AWS_ENDPOINT_URL or the profile's `services`
section, else from botocore's data on partitions, dual-stack and FIPS names. To find it we create a botocore client and
throw it away: that interface is stable across versions.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from anabranch._aws.credentials import CredentialSource, frozen_credentials
from anabranch._daemon_threads import DaemonThreads
from anabranch._http.client.dialer import Endpoint, Proxy, parse_endpoint, proxy_for, system_has_certificates
from anabranch._model.streams import StreamName
from anabranch.config import Aws
from anabranch.errors import ConfigurationError, CredentialsError, UsageError

T = TypeVar("T")


# Sessions and addresses. These functions block: they read files.


def botocore_session(aws: Aws) -> Any:
    import botocore.session  # noqa: PLC0415 -- loaded when first needed, so that `import anabranch` is fast
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- as above

    if aws.session is not None:
        # boto3's session wraps botocore's, which has region and profile.
        session = getattr(aws.session, "_session", aws.session)
        if not isinstance(session, botocore.session.Session):
            raise ConfigurationError("session must be a boto3.Session or a botocore.session.Session")
        if type(session).__module__.startswith("aiobotocore"):
            raise ConfigurationError(
                "session: aiobotocore sessions are not supported; pass a boto3 or botocore session"
            )
        return session
    try:
        session = botocore.session.Session(profile=aws.profile)
        session.get_scoped_config()
    except BotoCoreError as error:
        raise CredentialsError(f"cannot use the AWS profile: {error}") from error
    return session


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    region: str
    endpoint: Endpoint
    proxy: Proxy | None = None
    ca_bundle: str | None = None
    """None: use the system's certificates."""


def configured_region(session: Any, aws: Aws) -> str | None:
    """From botocore's chain, then AWS_REGION, which other SDKs and platforms use; None if no region is configured."""
    found = aws.region or session.get_config_variable("region") or os.environ.get("AWS_REGION")
    return str(found) if found else None


def resolve_region(session: Any, aws: Aws, region: str | None) -> str:
    """`region` if given (it comes from a stream's ARN), else the configured region."""
    found = region or configured_region(session, aws)
    if found is None:
        raise CredentialsError(
            "no AWS region: set AWS_REGION, pass one (--region, Aws(region=...)), or set one in the profile "
            "(aws configure)"
        )
    return found


def resolve_address(
    session: Any, aws: Aws, service: str, region: str | None = None, endpoint_url: str | None = None
) -> ServiceAddress:
    """A given `endpoint_url` is used as it is."""
    region = resolve_region(session, aws, region)
    url = endpoint_url or _endpoint_url(session, aws, service, region)
    try:
        endpoint = parse_endpoint(url)
    except ValueError as error:
        raise ConfigurationError(f"endpoint_url: {error}") from None
    return ServiceAddress(region, endpoint, proxy_for(endpoint), _ca_bundle(session))


def _endpoint_url(session: Any, aws: Aws, service: str, region: str) -> str:
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- botocore is loaded when first needed

    try:
        client = session.create_client(
            service,
            region_name=region,
            endpoint_url=aws.endpoint_url if service == "kinesis" else None,
            aws_access_key_id="nobody",  # no call is made; this keeps botocore from looking for real credentials
            aws_secret_access_key="nothing",  # noqa: S106 -- as above
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigurationError(f"no endpoint for {service} in {region!r}: {error}") from error
    url = str(client.meta.endpoint_url)
    client.close()
    return url


def _ca_bundle(session: Any) -> str | None:
    named = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    if named:
        return str(named)
    if system_has_certificates():
        return None
    from botocore.httpsession import DEFAULT_CA_BUNDLE  # noqa: PLC0415 -- needed only in images without certificates

    return str(DEFAULT_CA_BUNDLE)


def make_client(
    session: Any, aws: Aws, service: str, config: Any, *, region: str | None = None, endpoint_url: str | None = None
) -> Any:
    """A botocore client. Without given credentials, it finds them itself."""
    keys: dict[str, str | None] = {}
    if aws.credentials is not None:
        frozen = frozen_credentials(aws.credentials)
        keys = {
            "aws_access_key_id": frozen.access_key_id,
            "aws_secret_access_key": frozen.secret_access_key,
            "aws_session_token": frozen.session_token,
        }
    region = resolve_region(session, aws, region)
    return session.create_client(service, region_name=region, endpoint_url=endpoint_url, config=config, **keys)


# The account


class AwsAccount:
    def __init__(self, aws: Aws | None = None) -> None:
        self.aws = aws or Aws()
        self._thread = DaemonThreads(1, "anabranch-aws")
        """Only one, because botocore's sessions are not thread-safe."""
        self.credentials = CredentialSource(self._find_credentials, self._thread)
        self._kept_session: Any = None

    async def address(
        self, service: str, *, region: str | None = None, endpoint_url: str | None = None
    ) -> ServiceAddress:
        """`region` and `endpoint_url` override the configured ones: they come from a stream's ARN or a store's URL."""
        return await self._in_thread(lambda: resolve_address(self._session(), self.aws, service, region, endpoint_url))

    async def common_region(self, streams: Sequence[StreamName]) -> str | None:
        """The one region of all these streams: the region of the ARNs among them, or None for the configured one.

        A stream given by its name is in the configured region. If the ARNs name another region, one client would look
        for some of the streams in the wrong region, where another stream may have the same name.
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
                "pass the ARN of every stream"
            )
        return next(iter(by_arn), None)

    async def client(
        self,
        service: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        read_seconds_max: float | None = None,
    ) -> Any:
        """A botocore client for rare calls. It blocks: call it in threads. `read_seconds_max` is how long it waits for
        an answer; None is botocore's default, 60 s.
        """

        def make() -> Any:
            from botocore.config import Config  # noqa: PLC0415 -- botocore is loaded when first needed

            # Aws(endpoint_url=...) is for Kinesis only: other services have their own variables and profile sections.
            url = endpoint_url or (self.aws.endpoint_url if service == "kinesis" else None)
            config = Config(
                connect_timeout=10,
                read_timeout=read_seconds_max or 60,
                retries={"total_max_attempts": 1},  # the caller decides about retries
                # Bucket names in the host name need the DNS of AWS.
                s3=None if url is None else {"addressing_style": "path"},
            )
            return make_client(self._session(), self.aws, service, config, region=region, endpoint_url=url)

        return await self._in_thread(make)

    def start_thread(self) -> None:
        """Starts the thread before the first call: while the interpreter shuts down, no thread can be started."""
        self._thread.start()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            pending = self._thread.submit(work)
        except RuntimeError:
            raise UsageError("this client is closed") from None
        return await asyncio.wrap_future(pending)

    # Runs in the thread

    def _session(self) -> Any:
        if self._kept_session is None:
            self._kept_session = botocore_session(self.aws)
        return self._kept_session

    def _find_credentials(self, fresh: bool) -> Any:  # noqa: FBT001 -- the only argument of the callback
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- botocore is loaded when first needed

        if self.aws.credentials is not None:
            return self.aws.credentials
        # A session reads files and variables only once. A new one sees what another program has renewed since.
        session = botocore_session(self.aws) if fresh and self.aws.session is None else self._session()
        try:
            return session.get_credentials()
        except BotoCoreError as error:
            raise CredentialsError(f"cannot find AWS credentials: {error}") from error

"""Where a service is: region and endpoint by botocore's rules. Blocks: it reads files.

The endpoint comes from `Aws(endpoint_url=...)`, AWS_ENDPOINT_URL_KINESIS, AWS_ENDPOINT_URL or the profile's
`services` section, else from botocore's own knowledge of partitions, dual-stack and FIPS names. A client is made and
thrown away for it: that is the interface that stays the same from version to version.
"""

import os
from dataclasses import dataclass
from typing import Any

from anabranch._http.client.dialer import system_has_certificates
from anabranch._http.client.endpoint import Endpoint, Proxy, parse_endpoint, proxy_for
from anabranch.config import Aws
from anabranch.errors import ConfigurationError, CredentialsError

__all__ = ["ServiceAddress", "configured_region", "resolve_address", "resolve_region"]


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    region: str
    endpoint: Endpoint
    proxy: Proxy | None = None
    ca_bundle: str | None = None
    """None for the system's certificates."""


def configured_region(session: Any, aws: Aws) -> str | None:
    """By botocore's chain, then AWS_REGION, which other SDKs and platforms use; None where nothing names one."""
    found = aws.region or session.get_config_variable("region") or os.environ.get("AWS_REGION")
    return str(found) if found else None


def resolve_region(session: Any, aws: Aws, region: str | None) -> str:
    """That of a stream's ARN, if one is given: no other has the stream. Else the configured one."""
    found = region or configured_region(session, aws)
    if found is None:
        raise CredentialsError(
            "no AWS region: set AWS_REGION, give one (--region, Aws(region=...)), or name one in the profile "
            "(aws configure)"
        )
    return found


def resolve_address(session: Any, aws: Aws, service: str, region: str | None = None) -> ServiceAddress:
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- botocore is loaded when first needed

    region = resolve_region(session, aws, region)
    try:
        client = session.create_client(
            service,
            region_name=region,
            endpoint_url=aws.endpoint_url if service == "kinesis" else None,
            aws_access_key_id="nobody",  # no call is made: these keep botocore from looking for real ones
            aws_secret_access_key="nothing",  # noqa: S106 -- as above
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigurationError(f"there is no endpoint for {service} in {region!r}: {error}") from error
    url = client.meta.endpoint_url
    client.close()
    try:
        endpoint = parse_endpoint(url)
    except ValueError as error:
        raise ConfigurationError(f"endpoint_url: {error}") from None
    return ServiceAddress(region, endpoint, proxy_for(endpoint, os.environ), _ca_bundle(session))


def _ca_bundle(session: Any) -> str | None:
    named = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    if named:
        return str(named)
    if system_has_certificates():
        return None
    from botocore.httpsession import DEFAULT_CA_BUNDLE  # noqa: PLC0415 -- only an image without certificates needs it

    return str(DEFAULT_CA_BUNDLE)

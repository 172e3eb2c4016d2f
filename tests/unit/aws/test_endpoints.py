import asyncio

import pytest

from anabranch._aws import account as account_module
from anabranch._aws.account import AwsAccount
from anabranch.config import Aws
from anabranch.errors import ConfigurationError, CredentialsError


def address(aws=None, *, region=None, service="kinesis"):
    async def main():
        account = AwsAccount(aws)
        try:
            return await account.address(service, region=region)
        finally:
            account.close()

    return asyncio.run(main())


def test_a_region_alone_is_enough(monkeypatch):
    found = address(Aws(region="eu-north-1"))
    assert (found.region, found.endpoint.url) == ("eu-north-1", "https://kinesis.eu-north-1.amazonaws.com")
    assert address(Aws(region="cn-north-1")).endpoint.host == "kinesis.cn-north-1.amazonaws.com.cn"
    assert address(region="eu-west-3").region == "eu-west-3"
    assert address(Aws(region="eu-north-1"), region="eu-west-3").region == "eu-west-3"  # as a stream's ARN says
    monkeypatch.setenv("AWS_REGION", "sa-east-1")
    assert address().region == "sa-east-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "ap-south-1")
    assert address().region == "ap-south-1"


def test_no_region_is_an_error_that_says_where_to_put_one():
    with pytest.raises(CredentialsError, match=r"AWS_REGION.*Aws\(region=...\).*aws configure"):
        address()


def test_endpoints_come_from_the_standard_settings_in_their_order(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    config = tmp_path / "config"
    config.write_text("[default]\nservices = here\n\n[services here]\nkinesis =\n  endpoint_url = http://section:1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    assert address().endpoint.url == "http://section:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://every:2")
    assert address().endpoint.url == "http://every:2"
    monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", "http://kinesis:3")
    assert address().endpoint.url == "http://kinesis:3"
    assert address(Aws(endpoint_url="http://given:4")).endpoint.url == "http://given:4"
    assert address(Aws(endpoint_url="http://given:4"), service="dynamodb").endpoint.url == "http://every:2"


def test_dual_stack_and_fips_endpoints_are_botocores(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
    assert address().endpoint.host == "kinesis.us-east-1.api.aws"
    monkeypatch.setenv("AWS_USE_FIPS_ENDPOINT", "true")
    monkeypatch.delenv("AWS_USE_DUALSTACK_ENDPOINT")
    assert address().endpoint.host == "kinesis-fips.us-east-1.amazonaws.com"


def test_the_certificate_bundle_comes_from_the_standard_settings(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.setattr(account_module, "system_has_certificates", lambda: True)
    assert address().ca_bundle is None
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/requests.pem")
    assert address().ca_bundle == "/requests.pem"
    monkeypatch.setenv("AWS_CA_BUNDLE", "/aws.pem")
    assert address().ca_bundle == "/aws.pem"
    monkeypatch.delenv("AWS_CA_BUNDLE")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    monkeypatch.setattr(account_module, "system_has_certificates", lambda: False)
    assert address().ca_bundle.endswith(".pem")


def test_a_proxy_is_found_for_the_endpoint(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert repr(address().proxy) == "Proxy(proxy:3128)"
    monkeypatch.setenv("NO_PROXY", ".amazonaws.com")
    assert address().proxy is None


def test_an_endpoint_with_a_path_is_refused(monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    with pytest.raises(ConfigurationError, match="but no path"):
        address(Aws(endpoint_url="http://localhost:4567/kinesis"))

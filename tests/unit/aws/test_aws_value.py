import subprocess
import sys

import botocore.session
import pytest

from anabranch.config import Aws
from anabranch.errors import ConfigurationError


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigurationError) as failure:
        Aws(region="EU West", profile="p", endpoint_url="localhost:4567", session=object(), credentials=object())
    named = [violation.partition(":")[0] for violation in failure.value.violations]
    assert named == ["region", "profile", "endpoint_url", "session", "credentials"]


@pytest.mark.parametrize("region", ["eu-west-1", "us-gov-west-1", "cn-north-1", "us-iso-east-1"])
def test_regions_of_every_partition_are_taken(region):
    assert Aws(region=region).region == region


@pytest.mark.parametrize(
    "url", ["http://localhost:4567", "https://[::1]:4567", "https://vpce-1.kinesis.eu-west-1.vpce.amazonaws.com"]
)
def test_an_endpoint_is_a_url(url):
    assert Aws(endpoint_url=url).endpoint_url == url


@pytest.mark.parametrize("url", ["", "kinesis", "ftp://x", "http://", "http://x:99999", "http://[::1"])
def test_what_is_no_endpoint_is_refused(url):
    with pytest.raises(ConfigurationError, match="endpoint_url"):
        Aws(endpoint_url=url)


def test_secrets_are_never_shown():
    class Keys:
        access_key, secret_key, token = "AKID", "very secret", None

    shown = repr(Aws(region="eu-west-1", credentials=Keys(), session=botocore.session.Session()))
    assert shown == "Aws(region='eu-west-1', session=..., credentials=...)"


def test_importing_anabranch_loads_no_botocore():
    heavy = "('boto', 'h2', 'rich', 'cryptography')"
    program = f"import sys, anabranch, anabranch.config; print([m for m in sys.modules if m.startswith({heavy})])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

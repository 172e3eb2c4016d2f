"""What all test folders share: Hypothesis profiles, an environment without AWS, servers that are installed or named."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and children inherit that. Some tests send SIGINT to children.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The gate is deterministic. To search for new examples: pytest --hypothesis-profile=explore
settings.register_profile("gate", derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "explore", deadline=None, print_blob=True, max_examples=1_000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gate")


@pytest.fixture(autouse=True)
def _no_aws_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests never reach outside the machine, nor read the developer's own credentials and state."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "ANABRANCH_"))]:
        monkeypatch.delenv(name)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    nowhere = tmp_path_factory.getbasetemp() / "nowhere"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(nowhere / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))

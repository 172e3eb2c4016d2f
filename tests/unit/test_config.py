"""Settings are checked whole, and every violation says what would be right."""

import pytest

from anabranch.budget import Budget
from anabranch.config import Aws, CheckpointSettings, ConsumerSettings, LeaseSettings, PollingSettings, ProducerSettings
from anabranch.errors import ConfigurationError


class Session:
    def get_credentials(self):
        return None


class Keys:
    access_key, secret_key, token = "AKID", "a secret", None


class Refreshable:
    def get_frozen_credentials(self):
        return Keys()


def test_a_drain_ends_well_before_the_default_grace_period_of_kubernetes():
    assert LeaseSettings().drain_deadline == 20.0


@pytest.mark.parametrize(
    "settings", [Aws, LeaseSettings, PollingSettings, CheckpointSettings, ConsumerSettings, ProducerSettings]
)
def test_the_defaults_are_valid(settings):
    assert settings() == settings()


@pytest.mark.parametrize(
    "kind, setting, message",
    [
        (LeaseSettings, {"expiry": 2.9}, "expiry is 2.9 s; it must be at least 3 s"),
        (LeaseSettings, {"max_shards": 0}, "max_shards is 0; it must be at least 1, or None for a fair share"),
        (LeaseSettings, {"stall_limit": 5.0}, "it must not be shorter than expiry, 10.0 s"),
        (LeaseSettings, {"drain_deadline": 0}, "drain_deadline is 0 s; it must be positive"),
        (LeaseSettings, {"hand_off": "take"}, "hand_off is 'take'; it must be 'keep' or 'force'"),
        (LeaseSettings, {"on_zombie": "wait"}, "on_zombie is 'wait'; it must be 'report' or 'exit'"),
        (LeaseSettings, {"create": "always"}, "create is 'always'; it must be 'if_missing' or 'never'"),
        (LeaseSettings, {"worker_id": ""}, "worker_id is ''; it must have 1 to 64 bytes"),
        (LeaseSettings, {"worker_id": "ü" * 33}, "it must have 1 to 64 bytes in UTF-8"),
        (LeaseSettings, {"worker_id": "a\nb"}, "all printable"),
        (LeaseSettings, {"worker_id": 'a"b'}, "without quotation marks and backslashes"),
        (PollingSettings, {"shard_share": 0}, "shard_share is 0; it must be above 0 and at most 1"),
        (PollingSettings, {"shard_share": 1.1}, "shard_share is 1.1"),
        (PollingSettings, {"idle_interval": 0.1}, "idle_interval is 0.1 s; it must be from 0.2 to 60 s"),
        (PollingSettings, {"idle_interval": 61}, "idle_interval is 61 s"),
        (PollingSettings, {"listing_interval": 0.5}, "listing_interval is 0.5 s; it must be at least 1 s"),
        (PollingSettings, {"misrouted": "drop"}, "misrouted is 'drop'; it must be 'by_writer', 'deliver' or 'skip'"),
        (ProducerSettings, {"shard_share": 0}, "shard_share is 0; it must be above 0 and at most 1"),
        (
            ProducerSettings,
            {"shard_bytes_per_second": 0},
            "shard_bytes_per_second is 0; it must be above 0 and at most",
        ),
        (ProducerSettings, {"shard_bytes_per_second": 1 << 21}, "at most 1048576, a shard's quota"),
        (ProducerSettings, {"shard_records_per_second": -1}, "shard_records_per_second is -1; it must be above 0"),
        (ProducerSettings, {"shard_records_per_second": 1001.0}, "at most 1000, a shard's quota"),
        (ProducerSettings, {"shard_records_per_second": "many"}, "shard_records_per_second"),
        (ProducerSettings, {"requests_in_flight": 65}, "requests_in_flight is 65; it must be from 1 to 64"),
        (ProducerSettings, {"after_failure": "stop"}, "after_failure is 'stop'; it must be 'fail' or 'continue'"),
        (ProducerSettings, {"aggregate_partition_key": ""}, "aggregate_partition_key must have 1 to 256 characters"),
        (CheckpointSettings, {"interval": 0}, "interval is 0 s; it must be from 0.01 to 300 s"),
        (CheckpointSettings, {"records": 0}, "records is 0; it must be at least 1"),
        (CheckpointSettings, {"replay_bytes_max": 1000}, "replay_bytes_max is 1000; it must be at least 1 MiB"),
        (ConsumerSettings, {"start_timeout": -1.0}, "start_timeout is -1.0 s; it must not be negative"),
        (ConsumerSettings, {"at_shard_end": "skip"}, "at_shard_end is 'skip'; it must be 'wait' or 'finish'"),
        (ConsumerSettings, {"budget": 1 << 20}, "budget is 1048576 bytes; one read may need 25165824"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(kind, setting, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(**setting)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"region": "Frankfurt"}, "a region looks like eu-west-1, not 'Frankfurt'"),
        ({"profile": "p", "session": Session()}, "a session already has a profile"),
        ({"endpoint_url": "localhost:4567"}, "an endpoint looks like http://localhost:4567, not 'localhost:4567'"),
        ({"endpoint_url": "http://"}, "an endpoint looks like"),
        ({"endpoint_url": "http://host:0"}, "an endpoint looks like"),
        ({"endpoint_url": "http://host:99999"}, "an endpoint looks like"),
        ({"session": object()}, "must be a boto3 or botocore session, not object"),
        ({"credentials": object()}, r"must be an object with get_frozen_credentials\(\).*, not object"),
    ],
)
def test_an_aws_that_cannot_be_reached_is_refused_by_name(setting, message):
    with pytest.raises(ConfigurationError, match=message):
        Aws(**setting)


def test_all_violations_are_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        LeaseSettings(expiry=1.0, max_shards=0, stall_limit=0.5, drain_deadline=-1, worker_id="")
    assert len(caught.value.violations) == 5


def test_an_aws_shows_where_it_points_and_no_secret():
    aws = Aws(region="eu-west-1", endpoint_url="http://localhost:4567", credentials=Keys(), session=Session())
    assert repr(aws) == "Aws(region='eu-west-1', endpoint_url='http://localhost:4567', session=..., credentials=...)"
    assert repr(Aws(credentials=Refreshable())) == "Aws(credentials=...)"
    assert repr(Aws()) == "Aws()"


def test_a_budget_is_bytes_or_one_to_share():
    shared = Budget()
    assert ConsumerSettings(budget=shared).budget is shared
    assert ConsumerSettings(budget=64 << 20).budget == 64 << 20


def test_an_exclusive_name_must_be_given():
    with pytest.raises(ConfigurationError, match="worker_id_exclusive needs a worker_id"):
        LeaseSettings(worker_id_exclusive=True)

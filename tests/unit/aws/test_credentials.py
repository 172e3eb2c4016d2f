import asyncio
import datetime as dt
import logging
import threading

import botocore.credentials
import botocore.session
import pytest
from blockbuster import blockbuster_ctx

from anabranch._aws.account import AwsAccount
from anabranch._aws.credentials import CredentialSource
from anabranch._daemon_threads import DaemonThreads
from anabranch._wire.sigv4 import SigningCredentials
from anabranch.config import Aws
from anabranch.errors import ConfigurationError, CredentialsError, UsageError
from patience import PATIENCE


class Keys:
    def __init__(self, name, token=None):
        self.access_key, self.secret_key, self.token = name, "secret", token


class Time:
    now = 1_000.0

    def __call__(self):
        return self.now


def source_of(find, **options):
    return CredentialSource(find, DaemonThreads(1, "credentials"), **options)


def run(main):
    async def guarded():
        async with asyncio.timeout(20):
            with blockbuster_ctx("anabranch"):
                await main()

    asyncio.run(guarded())


def test_credentials_are_found_in_a_thread_and_kept():
    async def main():
        finders = []

        def find(anew):
            finders.append(threading.current_thread())
            return Keys("AKID", "token")

        source = source_of(find)
        assert source.current() is None
        first, second = await asyncio.gather(source.get(), source.get())
        assert first is second is source.current()
        assert first == SigningCredentials("AKID", "secret", "token")
        assert [thread is threading.main_thread() for thread in finders] == [False]
        source._thread.shutdown()

    run(main)


def test_they_are_refreshed_every_minute_while_calls_use_the_old_ones():
    async def main():
        time, names = Time(), iter(("one", "two", "three"))
        asked = threading.Event()
        go_on = threading.Event()

        class Refreshing:
            def get_frozen_credentials(self):
                name = next(names)
                if name != "one":
                    asked.set()
                    go_on.wait(PATIENCE)
                return Keys(name)

        source = source_of(lambda anew: Refreshing(), monotonic=time)
        first = await source.get()
        time.now += 61
        assert source.current() is first
        await asyncio.to_thread(asked.wait, PATIENCE)
        assert source.current() is first
        go_on.set()
        assert (await asyncio.wrap_future(source._reading)).access_key_id == "two"
        assert source.current().access_key_id == "two"
        time.now += 301
        assert source.current() is None
        assert (await source.get()).access_key_id == "three"
        source._thread.shutdown()

    run(main)


def test_the_same_credentials_stay_the_same_object():
    async def main():
        time = Time()
        source = source_of(lambda anew: Keys("AKID"), monotonic=time)
        first = await source.get()
        time.now += 400
        assert await source.get() is first
        source._thread.shutdown()

    run(main)


def test_a_failed_refresh_is_logged_and_the_present_ones_stay_in_use_for_a_while(caplog):
    async def main():
        time, failing = Time(), []

        class Refreshing:
            def get_frozen_credentials(self):
                if failing:
                    raise RuntimeError("no metadata service")
                return Keys("AKID")

        source = source_of(lambda anew: Refreshing(), monotonic=time)
        first = await source.get()
        failing.append(True)
        time.now += 61
        assert source.current() is first
        with pytest.raises(CredentialsError, match="no metadata service"):
            await asyncio.wrap_future(source._reading)
        assert source.current() is first
        time.now += 300
        with pytest.raises(CredentialsError, match="no metadata service"):
            await source.get()
        source._thread.shutdown()

    with caplog.at_level(logging.WARNING, "anabranch.aws"):
        run(main)
    assert "cannot refresh" in caplog.text


def test_refused_credentials_are_looked_up_again():
    async def main():
        found = {False: Keys("old"), True: Keys("new")}
        source = source_of(lambda anew: found[anew])
        old = await source.get()
        new = await source.renew(old)
        assert new.access_key_id == "new"
        assert await source.renew(old) is new
        source._thread.shutdown()
        with pytest.raises(UsageError):
            await source.renew(new)

    run(main)


@pytest.mark.parametrize("found", [None, Keys(""), Keys(None)])
def test_none_at_all_is_an_error_that_says_where_they_are_looked_for(found):
    async def main():
        source = source_of(lambda anew: found)
        with pytest.raises(CredentialsError, match=r"aws configure.*AWS_ACCESS_KEY_ID.*instance role"):
            await source.get()
        source._thread.shutdown()

    run(main)


def account_credentials(aws):
    async def main():
        account = AwsAccount(aws)
        try:
            results.append(await account.credentials.get())
        finally:
            account.close()

    results = []
    run(main)
    return results[0]


def test_the_chain_finds_them_in_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t")
    assert account_credentials(Aws()) == SigningCredentials("AKENV", "s", "t")


def test_a_profile_is_read_and_read_again_after_a_refusal(monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    file.write_text("[work]\naws_access_key_id = A1\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    async def main():
        account = AwsAccount(Aws(profile="work"))
        old = await account.credentials.get()
        file.write_text("[work]\naws_access_key_id = A2\naws_secret_access_key = s\n")
        new = await account.credentials.renew(old)
        assert (old.access_key_id, new.access_key_id) == ("A1", "A2")
        account.close()

    run(main)


def test_a_session_or_a_credentials_object_may_be_given():
    import boto3

    session = botocore.session.Session()
    session.set_credentials("AKS", "s")
    assert account_credentials(Aws(session=session)).access_key_id == "AKS"
    wrapped = boto3.Session(aws_access_key_id="AKB", aws_secret_access_key="s", region_name="eu-west-1")
    assert account_credentials(Aws(session=wrapped)).access_key_id == "AKB"
    given = botocore.credentials.Credentials("AKC", "s", "t")
    assert account_credentials(Aws(credentials=given)).session_token == "t"


def test_refreshable_credentials_are_refreshed_by_botocore():
    soon = (dt.datetime.now(dt.UTC) + dt.timedelta(minutes=5)).isoformat()
    later = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=5)).isoformat()

    def metadata(name, expiry):
        return {"access_key": name, "secret_key": "s", "token": "t", "expiry_time": expiry}

    given = botocore.credentials.RefreshableCredentials.create_from_metadata(
        metadata("old", soon), lambda: metadata("new", later), "test"
    )
    assert account_credentials(Aws(credentials=given)).access_key_id == "new"


def test_an_unknown_profile_is_refused_by_name():
    with pytest.raises(CredentialsError, match=r"profile.*nobody"):
        account_credentials(Aws(profile="nobody"))


def test_an_asynchronous_session_is_refused_with_advice():
    aiobotocore_session = pytest.importorskip("aiobotocore.session")
    with pytest.raises(ConfigurationError, match="boto3 or botocore session"):
        account_credentials(Aws(session=aiobotocore_session.get_session()))

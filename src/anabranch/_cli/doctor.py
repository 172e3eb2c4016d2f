"""`anabranch doctor`: checks credentials, permissions, clock, limits, a stream and a lease store.

Each check reports what it found and what to do about it. Doctor changes nothing. Its only write is a dry run, and it
sends that only if the service has just confirmed a dry run of a read. If a check fails, those that need it are skipped.
"""

import argparse
import asyncio
import os
import platform
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from anabranch._cli.options import add_aws_options, add_json_option, add_leases_option, aws_from, stream_argument
from anabranch._cli.output import DONE, FAILED, counted, make_console, print_json, styled
from anabranch._model.streams import StartingPosition, StreamName
from anabranch._version import __version__
from anabranch.config import Aws
from anabranch.errors import AccessDeniedError, AnabranchError, InvalidRequestError, StreamNotFoundError
from anabranch.limits import CONSUMERS_PER_STREAM_MAX

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch._aws.account import AwsAccount, ServiceAddress
    from anabranch._aws.kinesis_client import KinesisClient
    from anabranch._wire.messages import StreamSummary


_CLOCK_SKEW_WARNING_MS: Final = 5_000
_CLOCK_SKEW_MAX_MS: Final = 300_000  # AWS rejects signatures that are more than five minutes off
_QUOTA_WARNING_SHARE: Final = 0.9
_SLOW_RESPONSE_MS: Final = 1_000


class Finding(msgspec.Struct, frozen=True):
    """One line of the report, and one object of its JSON."""

    check: str
    state: Literal["ok", "warn", "fail", "skip"]
    finding: str
    advice: str | None = None


class Checkup:
    def __init__(self, aws: Aws, *, stream: StreamName | None, app: str | None, leases: str | None) -> None:
        self._aws = aws
        self._stream = stream
        self._app = app
        self._leases = leases

    async def findings(self) -> AsyncIterator[Finding]:
        """Yields each finding as soon as its check is done."""
        from anabranch._aws.account import AwsAccount

        yield _versions()
        account = AwsAccount(self._aws)
        try:
            async for finding in self._account_findings(account):
                yield finding
        finally:
            account.close()
        yield await self._store()

    async def _account_findings(self, account: "AwsAccount") -> AsyncIterator[Finding]:
        region = None if self._stream is None else self._stream.region
        try:
            address = await account.address("kinesis", region=region)
        except AnabranchError as error:
            yield Finding("region", "fail", _one_line(error), "pass --region or set AWS_REGION")
            return
        yield Finding("region", "ok", address.region)
        credentials = await self._credentials()
        yield credentials
        endpoint, clock = await _endpoint(address)
        for finding in (endpoint, clock):
            yield finding
        if credentials.state == "fail" or endpoint.state == "fail":
            yield Finding("permissions", "skip", "needs credentials and an endpoint that responds")
            return
        async for finding in self._service_findings(account, region):
            yield finding

    async def _credentials(self) -> Finding:
        from anabranch._aws.account import botocore_session
        from anabranch._aws.credentials import frozen_credentials

        def find() -> tuple[str, str]:
            found = botocore_session(self._aws).get_credentials()
            return frozen_credentials(found).access_key_id, str(getattr(found, "method", "unknown"))

        try:
            access_key_id, method = await asyncio.to_thread(find)
        except AnabranchError as error:
            return Finding("credentials", "fail", _one_line(error), "aws configure, aws sso login, or --profile NAME")
        return Finding("credentials", "ok", f"access key ...{access_key_id[-4:]}, from {method}")

    async def _service_findings(self, account: "AwsAccount", region: str | None) -> AsyncIterator[Finding]:
        from anabranch._aws.control import BotocoreCalls, KinesisControl
        from anabranch._aws.kinesis_client import open_kinesis

        control = KinesisControl(account, region=region)
        calls = BotocoreCalls(account, "kinesis", region=region)
        try:
            async with await open_kinesis(account, region=region) as client:
                yield await _limits(control)
                if self._stream is None:
                    yield Finding("permissions", "skip", "no stream was given", "run anabranch doctor STREAM")
                    return
                checkup = _StreamCheckup(self._stream, client, calls)
                async for finding in checkup.findings():
                    yield finding
        finally:
            control.close()
            calls.close()

    async def _store(self) -> Finding:
        from anabranch.stores.urls import default_store, open_store

        if self._leases is None and self._app is None:
            return Finding("store", "skip", "no application was given", "pass --app NAME or --leases URL")
        app = self._app or "doctor"
        try:
            store = default_store(app, os.environ) if self._leases is None else open_store(self._leases, app)
            try:
                row = await store.read_app()
                if row is not None:
                    await store.open(row)
                members = () if row is None else (await store.poll()).members
            finally:
                await store.close()
        except AnabranchError as error:
            return Finding("store", "fail", _one_line(error), "pass the same URL as the consumer's leases=")
        if self._app is None:
            return Finding("store", "ok", "responds")
        if row is None:
            return Finding("store", "ok", f"responds; application {app!r} has not used it yet")
        return Finding("store", "ok", f"responds; application {app!r} has {counted(len(members), 'member')}")


class _StreamCheckup:
    """Checks one stream: its state, and the permissions that its consumers and producers need."""

    def __init__(self, stream: StreamName, client: "KinesisClient", calls: Any) -> None:
        self._stream = stream
        self._client = client
        self._calls = calls

    async def findings(self) -> AsyncIterator[Finding]:
        try:
            summary = await self._client.describe_stream_summary(self._stream)
        except AnabranchError as error:
            yield _failure("stream", "DescribeStreamSummary", error)
            return
        yield _stream_state(summary)
        try:
            shard_id = await self._first_open_shard()
        except AnabranchError as error:
            yield _failure("reading", "ListShards", error)
            return
        if shard_id is None:
            yield Finding("reading", "skip", "the stream lists no open shard yet", "wait until it is ACTIVE")
            return
        supports_dry_runs, reading = await self._reading(shard_id)
        yield reading
        yield (
            await self._writing()
            if supports_dry_runs
            else Finding("writing", "skip", "this service or botocore version does not support dry runs of PutRecord")
        )
        yield await self._fan_out(summary)

    async def _first_open_shard(self) -> str | None:
        from anabranch._model.streams import AT_LATEST

        page = await self._client.list_shards(self._stream, shard_filter=AT_LATEST, max_results=1)
        return page.shards[0].shard_id if page.shards else None

    async def _reading(self, shard_id: str) -> tuple[bool, Finding]:
        """Also checks whether the service supports dry runs. If not, a dry run of PutRecord would write a record."""
        operation = "GetShardIterator"
        supports_dry_runs = False
        try:
            supports_dry_runs = await self._dry_run(operation, ShardId=shard_id, ShardIteratorType="LATEST")
            iterator = await self._client.get_shard_iterator(self._stream, shard_id, StartingPosition("LATEST"))
            operation = "GetRecords"
            await self._client.get_records(self._stream, iterator, limit=1)
        except AnabranchError as error:
            return supports_dry_runs, _failure("reading", operation, error)
        allowed = "DescribeStreamSummary, ListShards, GetShardIterator and GetRecords are allowed"
        return supports_dry_runs, Finding("reading", "ok", allowed)

    async def _writing(self) -> Finding:
        try:
            confirmed = await self._dry_run("PutRecord", Data=b"dry run", PartitionKey="doctor")
        except AnabranchError as error:
            return _failure("writing", "PutRecord", error)
        if not confirmed:
            return Finding(
                "writing", "warn", "the service did not confirm the dry run of PutRecord",
                "it may have written one record with the partition key 'doctor'",
            )  # fmt: skip
        return Finding("writing", "ok", "PutRecord is allowed (dry run: nothing was written)")

    async def _fan_out(self, summary: "StreamSummary") -> Finding:
        try:
            page = await self._client.list_stream_consumers(summary.arn)
        except AnabranchError as error:
            return _failure("fan-out", "ListStreamConsumers", error, only_for="enhanced fan-out")
        count = f"{len(page.consumers)} of {CONSUMERS_PER_STREAM_MAX} enhanced fan-out consumers are registered"
        if len(page.consumers) >= CONSUMERS_PER_STREAM_MAX:
            return Finding("fan-out", "warn", count, "deregister one before you add another")
        return Finding("fan-out", "ok", count)

    async def _dry_run(self, operation: str, **parameters: Any) -> bool:
        """True if the service confirmed the dry run; False if it does not support dry runs."""
        from anabranch._wire.bodies import stream_members

        try:
            await self._calls.call(operation, DryRun=True, **parameters, **stream_members(self._stream))
        except InvalidRequestError as error:
            if error.code == "DryRunOperationException":
                return True
            if error.code in {"ParamValidation", "ValidationException", "SerializationException"}:
                return False
            raise
        return False


def _versions() -> Finding:
    import botocore

    versions = f"anabranch {__version__}, Python {platform.python_version()}, botocore {botocore.__version__}"
    return Finding("versions", "ok", versions)


async def _endpoint(address: "ServiceAddress") -> tuple[Finding, Finding]:
    """The findings about the endpoint and the clock."""
    from anabranch._aws.service import probe

    where = address.endpoint.url if address.proxy is None else f"{address.endpoint.url} through {address.proxy!r}"
    try:
        answer = await probe(address)
    except AnabranchError as error:
        advice = "AWS needs internet access, a proxy or a VPC endpoint; anabranch serve starts a local endpoint"
        clock = Finding("clock", "skip", "needs an endpoint that responds")
        return Finding("endpoint", "fail", _one_line(error), advice), clock
    time = f"{where} responds in {answer.round_trip_ms} ms, including the time to connect"
    if answer.round_trip_ms > _SLOW_RESPONSE_MS:
        found = Finding("endpoint", "warn", time, "check the region and the network")
    else:
        found = Finding("endpoint", "ok", time)
    return found, _clock(answer.clock_ahead_ms)


def _clock(ahead_ms: int | None) -> Finding:
    if ahead_ms is None:
        return Finding("clock", "skip", "the response has no Date header")
    off = f"{abs(ahead_ms) / 1000:.1f} s {'ahead of' if ahead_ms > 0 else 'behind'} the service's clock"
    if abs(ahead_ms) <= _CLOCK_SKEW_WARNING_MS:
        return Finding("clock", "ok", "in sync with the service's clock")
    advice = "synchronize it with NTP (chrony, systemd-timesyncd)"
    if abs(ahead_ms) < _CLOCK_SKEW_MAX_MS:
        return Finding("clock", "warn", off, advice)
    return Finding("clock", "fail", off, f"{advice}: AWS rejects signatures that are more than five minutes off")


async def _limits(control: Any) -> Finding:
    try:
        limits = await control.describe_limits()
    except AnabranchError as error:
        return _failure("limits", "DescribeLimits", error, only_for="this check")
    counts = f"{limits.open_shard_count} of {limits.shard_count_max} shards are open in this account and region"
    if limits.on_demand_stream_count_max is not None:
        counts += f", {limits.on_demand_stream_count} of {limits.on_demand_stream_count_max} on-demand streams"
    if limits.open_shard_count >= _QUOTA_WARNING_SHARE * limits.shard_count_max:
        return Finding(
            "limits", "warn", counts, "request a higher quota before you split shards (Service Quotas, Kinesis)"
        )
    return Finding("limits", "ok", counts)


def _stream_state(summary: "StreamSummary") -> Finding:
    found = f"{summary.name} is {summary.status}, with {counted(summary.open_shard_count, 'open shard')}"
    if summary.status in {"CREATING", "DELETING"}:
        return Finding("stream", "warn", found, "wait until it is ACTIVE or UPDATING")
    if summary.record_distribution == "AUTO":
        return Finding("stream", "warn", found, "record distribution is AUTO: there is no order per key")
    return Finding("stream", "ok", found)


def _failure(check: str, operation: str, error: AnabranchError, *, only_for: str | None = None) -> Finding:
    if isinstance(error, AccessDeniedError):
        advice = f"allow kinesis:{operation} in the policy of this identity"
        if only_for is not None:
            return Finding(check, "warn", _one_line(error), f"{advice} (only {only_for} needs it)")
        return Finding(check, "fail", _one_line(error), advice)
    if isinstance(error, StreamNotFoundError):
        return Finding(check, "fail", _one_line(error), "run anabranch streams ls to list the streams")
    return Finding(check, "fail", _one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_EXAMPLES: Final = """\
examples:
  anabranch doctor
  anabranch doctor orders --profile production
  anabranch doctor orders --app billing --leases sqlite:///var/lib/billing.db
  anabranch doctor --json | jq '.[] | select(.state == "fail")'

Changes nothing in AWS. The exit code is 1 if a check failed; warnings and
skipped checks do not count.
"""
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "stream", nargs="?", type=stream_argument, metavar="STREAM",
        help="also check this stream and the permissions on it",
    )  # fmt: skip
    parser.add_argument("--app", metavar="NAME", help="also check the lease store of this application")
    add_leases_option(parser, "its lease store", default="its file on this machine")
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    checkup = Checkup(aws_from(arguments), stream=arguments.stream, app=arguments.app, leases=arguments.leases)
    console = None if arguments.json else make_console()
    findings = asyncio.run(_run_checks(checkup, console))
    if arguments.json:
        print_json(findings)
    return FAILED if any(finding.state == "fail" for finding in findings) else DONE


async def _run_checks(checkup: Checkup, console: "Console | None") -> list[Finding]:
    """Prints each finding immediately, because some checks are slow."""
    findings: list[Finding] = []
    async for finding in checkup.findings():
        findings.append(finding)
        if console is not None:
            line = styled("").append(f"{finding.state:<5}", _STYLES[finding.state])
            console.print(line.append(f"{finding.check:<12}", "bold").append(finding.finding), soft_wrap=True)
            if finding.advice is not None:
                console.print(styled(f"{'':17}-> {finding.advice}"), soft_wrap=True)
    return findings

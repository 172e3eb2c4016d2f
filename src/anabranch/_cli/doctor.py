"""`anabranch doctor`: checks credentials, permissions, clock, limits, a stream and a lease store.

Each check reports what it found and what to do about it. Doctor changes nothing. Its only write is a dry run, and it
sends that only if the service has just confirmed a dry run of a read. If a check fails, those that need it are skipped.
"""

import argparse
import asyncio
import os
import platform
import shlex
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from anabranch._cli.options import (
    DEFAULT_LEASES,
    add_aws_options,
    add_json_option,
    add_leases_option,
    application_argument,
    aws_from,
    stream_argument,
)
from anabranch._cli.output import DONE, FAILED, counted, make_console, one_line, print_json, styled, wrapped
from anabranch._core.reading.registration import is_own_name, is_temporary_name, own_name
from anabranch._model.streams import AT_LATEST, StartingPosition, StreamName
from anabranch._version import __version__
from anabranch.errors import AccessDeniedError, AnabranchError, InvalidRequestError, LeaseError, StreamNotFoundError
from anabranch.limits import CONSUMERS_PER_STREAM_MAX

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch._aws.account import AwsAccount, ServiceAddress
    from anabranch._aws.control import BotocoreCalls, KinesisControl
    from anabranch._aws.kinesis_client import KinesisClient
    from anabranch._model.leases import AppRow
    from anabranch._ports import LeaseStore
    from anabranch._wire.messages import StreamSummary
    from anabranch.stores.dynamodb import DynamoDbLeaseStore
    from anabranch.stores.redis import RedisLeaseStore
    from anabranch.stores.s3 import S3LeaseStore


_CLOCK_SKEW_WARNING_MS: Final = 5_000
_CLOCK_SKEW_MAX_MS: Final = 300_000  # AWS rejects signatures that are more than five minutes off
_QUOTA_WARNING_SHARE: Final = 0.9
_SLOW_RESPONSE_MS: Final = 1_000
_STORE_READS: Final = 5
_SLOW_STORE_MS: Final = 250  # a sixth of a heartbeat's deadline


class Finding(msgspec.Struct, frozen=True):
    """One line of the report, and one object of its JSON."""

    check: str
    state: Literal["ok", "warn", "fail", "skip"]
    finding: str
    advice: str | None = None


class Checkup:
    """Runs the checks in order. Prints each finding at once, because some checks are slow."""

    def __init__(self, arguments: argparse.Namespace, console: "Console | None") -> None:
        self.findings: list[Finding] = []
        self._aws = aws_from(arguments)
        self._stream: StreamName | None = arguments.stream
        self._app: str | None = arguments.app
        self._leases: str | None = arguments.leases
        self._console = console
        self._own_consumers: list[str] = []
        """Consumers of the stream that anabranch registered."""

    def _report(self, *findings: Finding) -> None:
        self.findings += findings
        if self._console is not None:
            for finding in findings:
                _print(finding, self._console)

    async def run(self) -> None:
        from anabranch._aws.account import AwsAccount

        self._report(_versions())
        with closing(AwsAccount(self._aws)) as account:
            await self._check_account(account)
        await self._check_store()

    async def _check_account(self, account: "AwsAccount") -> None:
        region = None if self._stream is None else self._stream.region
        try:
            address = await account.address("kinesis", region=region)
        except AnabranchError as error:
            self._report(Finding("region", "fail", one_line(error), "pass --region or set AWS_REGION"))
            return
        self._report(Finding("region", "ok", address.region))
        credentials = await self._credentials()
        self._report(credentials)
        endpoint, clock = await _endpoint(address)
        self._report(endpoint, clock)
        if credentials.state == "fail" or endpoint.state == "fail":
            self._report(Finding("permissions", "skip", "needs credentials and an endpoint that responds"))
        else:
            await self._check_service(account, region)

    async def _credentials(self) -> Finding:
        from anabranch._aws.account import botocore_session
        from anabranch._aws.credentials import frozen_credentials

        def find() -> tuple[str, str]:
            found = botocore_session(self._aws).get_credentials()
            return frozen_credentials(found).access_key_id, str(getattr(found, "method", "unknown"))

        try:
            access_key_id, method = await asyncio.to_thread(find)
        except AnabranchError as error:
            return Finding("credentials", "fail", one_line(error), "aws configure, aws sso login, or --profile NAME")
        return Finding("credentials", "ok", f"access key ...{access_key_id[-4:]}, from {method}")

    async def _check_service(self, account: "AwsAccount", region: str | None) -> None:
        from anabranch._aws.control import BotocoreCalls, KinesisControl
        from anabranch._aws.kinesis_client import open_kinesis

        with closing(KinesisControl(account, region=region)) as control:
            self._report(await _limits(control))
        if self._stream is None:
            self._report(Finding("permissions", "skip", "no stream was given", "run anabranch doctor STREAM"))
            return
        with closing(BotocoreCalls(account, "kinesis", region=region)) as calls:
            async with await open_kinesis(account, region=region) as client:
                await self._check_stream(self._stream, client, calls)

    async def _check_stream(self, stream: StreamName, client: "KinesisClient", calls: "BotocoreCalls") -> None:
        """Its state, and the permissions that its consumers and producers need."""
        try:
            summary = await client.describe_stream_summary(stream)
        except AnabranchError as error:
            self._report(_failure("stream", "DescribeStreamSummary", error))
            return
        self._report(_stream_state(summary))
        try:
            page = await client.list_shards(stream, shard_filter=AT_LATEST, max_results=1)
        except AnabranchError as error:
            self._report(_failure("reading", "ListShards", error))
            return
        if not page.shards:
            nothing = "the stream lists no open shard yet"
            self._report(Finding("reading", "skip", nothing, "wait until it is ACTIVE"))
            return
        supports_dry_runs, reading = await _reading(stream, page.shards[0].shard_id, client, calls)
        self._report(reading)
        if supports_dry_runs:
            self._report(await _writing(stream, calls))
        else:
            unconfirmed = "no dry run of a read was confirmed, so a dry run of PutRecord might write a record"
            self._report(Finding("writing", "skip", unconfirmed))
        self._report(await self._fan_out(summary, client))

    async def _fan_out(self, summary: "StreamSummary", client: "KinesisClient") -> Finding:
        try:
            page = await client.list_stream_consumers(summary.arn)
        except AnabranchError as error:
            return _failure("fan-out", "ListStreamConsumers", error, only_for="enhanced fan-out")
        count = f"{len(page.consumers)} of {CONSUMERS_PER_STREAM_MAX} enhanced fan-out consumers are registered"
        self._own_consumers = own = [consumer.name for consumer in page.consumers if is_own_name(consumer.name)]
        if own:
            count += f"; made by anabranch: {', '.join(own)}"
        if leftovers := [name for name in own if is_temporary_name(name)]:
            removal = f"anabranch streams consumers rm {summary.name} {' '.join(leftovers)}"
            return Finding("fan-out", "warn", count, f"if no `tail --fanout` is running: {removal}")
        if len(page.consumers) >= CONSUMERS_PER_STREAM_MAX:
            return Finding("fan-out", "warn", count, "remove one that nobody uses: anabranch streams consumers rm")
        return Finding("fan-out", "ok", count)

    async def _check_store(self) -> None:
        from anabranch.stores.urls import default_store, leases_from, open_store

        leases = self._leases or leases_from(os.environ)
        if leases is None and self._app is None:
            self._report(Finding("store", "skip", "no application was given", "pass --app NAME or --leases URL"))
            return
        app = self._app or "doctor"
        try:
            store = default_store(app, os.environ, self._aws) if leases is None else open_store(leases, app, self._aws)
            try:
                await self._check_opened_store(store)
            finally:
                await store.close()
        except AnabranchError as error:
            self._report(Finding("store", "fail", one_line(error), "pass the same URL as the consumer's leases="))

    async def _check_opened_store(self, store: "LeaseStore") -> None:
        from anabranch.stores.dynamodb import DynamoDbLeaseStore
        from anabranch.stores.redis import RedisLeaseStore
        from anabranch.stores.s3 import S3LeaseStore

        if self._app is None:
            await store.read_app()
            self._report(Finding("store", "ok", f"{store} responds"))
        else:
            await self._check_application(store, self._app)
        self._report(await _store_latency(store))
        if isinstance(store, DynamoDbLeaseStore):
            self._report(*await _table_findings(store))
        elif isinstance(store, RedisLeaseStore):
            self._report(*await _redis_findings(store))
        elif isinstance(store, S3LeaseStore):
            self._report(await _bucket_finding(store))

    async def _check_application(self, store: "LeaseStore", app: str) -> None:
        row = await store.read_app()
        if row is None:
            self._report(Finding("store", "ok", f"{store} responds; application {app!r} has not used it yet"))
        else:
            await store.open(row)
            self._report(await _application_state(store, row))
        if await store.leftovers():
            found, advice = f"application {app!r} was deleted, but rows of it are left", None
            if row is None:
                advice = shlex.join(["anabranch", "apps", "delete", app])
            else:
                found += "; they do not affect the new application of that name, and are deleted with it"
            self._report(Finding("deletion", "warn", found, advice))
        current = None if row is None else own_name(app, row.app_id)
        left = [
            name
            for name in self._own_consumers
            if name != current and not is_temporary_name(name) and name == own_name(app, name[-8:])
        ]
        if left:
            found = f"left by an earlier application {app!r}: {', '.join(left)}"
            advice = f"anabranch streams consumers rm {self._stream} {' '.join(left)}"
            self._report(Finding("consumers", "warn", found, advice))


async def _reading(
    stream: StreamName, shard_id: str, client: "KinesisClient", calls: "BotocoreCalls"
) -> tuple[bool, Finding]:
    """Also checks whether the service confirms a dry run. If not, a dry run of PutRecord might write a record."""
    operation = "GetShardIterator"
    supports_dry_runs = False
    try:
        supports_dry_runs = await _dry_run(stream, calls, operation, ShardId=shard_id, ShardIteratorType="LATEST")
        iterator = await client.get_shard_iterator(stream, shard_id, StartingPosition("LATEST"))
        operation = "GetRecords"
        await client.get_records(stream, iterator, limit=1)
    except AnabranchError as error:
        return supports_dry_runs, _failure("reading", operation, error)
    allowed = "DescribeStreamSummary, ListShards, GetShardIterator and GetRecords are allowed"
    return supports_dry_runs, Finding("reading", "ok", allowed)


async def _writing(stream: StreamName, calls: "BotocoreCalls") -> Finding:
    try:
        confirmed = await _dry_run(stream, calls, "PutRecord", Data=b"dry run", PartitionKey="doctor")
    except AnabranchError as error:
        return _failure("writing", "PutRecord", error)
    if not confirmed:
        return Finding(
            "writing", "warn", "the service did not confirm the dry run of PutRecord",
            "it may have written one record with the partition key 'doctor'",
        )  # fmt: skip
    return Finding("writing", "ok", "PutRecord is allowed (dry run: nothing was written)")


async def _dry_run(stream: StreamName, calls: "BotocoreCalls", operation: str, **parameters: Any) -> bool:
    """True if the service confirmed the dry run; False if it does not support dry runs."""
    from anabranch._wire.bodies import stream_members

    try:
        await calls.call(operation, DryRun=True, **parameters, **stream_members(stream))
    except InvalidRequestError as error:
        if error.code == "DryRunOperationException":
            return True
        if error.code not in {"ParamValidation", "ValidationException", "SerializationException"}:
            raise
    return False


async def _application_state(store: "LeaseStore", row: "AppRow") -> Finding:
    if row.place == "moved":
        moved = f"application {row.app!r} was moved to {row.other_url}"
        return Finding("store", "warn", moved, "pass the URL of that store")
    if row.place != "here":
        way = f"to {row.other_url}" if row.place == "leaving" else f"from {row.other_url}"
        found = f"application {row.app!r} is being copied {way}, and no worker can start"
        return Finding("store", "warn", found, "repeat `anabranch apps copy` until it is complete")
    members = (await store.poll()).members
    return Finding("store", "ok", f"{store} responds; application {row.app!r} has {counted(len(members), 'member')}")


async def _store_latency(store: "LeaseStore") -> Finding:
    """The median of a few reads. A heartbeat must be answered within 15 % of the lease expiry: 1.5 s by default."""
    taken_ms = []
    for _ in range(_STORE_READS):
        started = time.monotonic()
        await store.read_app()
        taken_ms.append((time.monotonic() - started) * 1000)
    median = sorted(taken_ms)[len(taken_ms) // 2]
    found = f"a read takes {median:.1f} ms (the median of {_STORE_READS})"
    if median > _SLOW_STORE_MS:
        return Finding("latency", "warn", found, "heartbeats may be late: use a store in this region")
    return Finding("latency", "ok", found)


async def _table_findings(store: "DynamoDbLeaseStore") -> list[Finding]:
    from anabranch.stores.dynamodb import has_no_recovery

    table = store.table
    description = await table.describe()
    if description is None:
        missing = f"there is no DynamoDB table {table.name!r} yet: the first worker creates it"
        return [Finding("table", "warn", missing, "allow dynamodb:CreateTable, or create it with CloudFormation")]
    await table.identity()
    found = []
    if denied := await store.denied_actions():
        actions = ", ".join(f"dynamodb:{action}" for action in denied)
        found.append(Finding("table", "fail", f"not allowed: {actions}", "allow them in the policy of this identity"))
    else:
        allowed = "DescribeTable, GetItem, Query, PutItem, UpdateItem and DeleteItem are allowed (nothing was written)"
        found.append(Finding("table", "ok", allowed))
    off = [] if description.get("DeletionProtectionEnabled") else ["deletion protection"]
    recoverable, advice = None, "allow dynamodb:DescribeContinuousBackups to check it"
    try:
        recoverable = await table.is_recoverable()
    except LeaseError as error:
        if has_no_recovery(error):
            advice = "nothing to do: the server does not support it (DynamoDB Local does not)"
    if recoverable is False:
        off.append("point-in-time recovery")
    if off:
        found.append(Finding("protection", "warn", f"{' and '.join(off)} is off", "enable it for this table"))
    elif recoverable is None:
        unknown = "deletion protection is on; point-in-time recovery is unknown"
        found.append(Finding("protection", "skip", unknown, advice))
    else:
        found.append(Finding("protection", "ok", "deletion protection and point-in-time recovery are on"))
    return found


async def _redis_findings(store: "RedisLeaseStore") -> list[Finding]:
    server = await store.server()
    losses = "; ".join(server.losses())
    if not losses:
        kept = f"appendonly is on (appendfsync {server.appendfsync}), and nothing is evicted"
        durability = Finding("durability", "ok", kept)
    elif store.accepts_loss:
        durability = Finding("durability", "warn", losses, "the URL accepts this (?durability=accept_loss)")
    else:
        durability = Finding("durability", "fail", losses, "change that, or add ?durability=accept_loss")
    count = f"Redis {server.version} has {counted(server.replicas, 'replica')}; {store.replicas} must acknowledge"
    if server.replicas < store.replicas:
        advice = "no write can be acknowledged: add replicas, or lower ?replicas="
        return [durability, Finding("replicas", "fail", count, advice)]
    if server.replicas and not store.replicas:
        advice = "if a replica may become the primary, set ?replicas= to the number of replicas"
        return [durability, Finding("replicas", "warn", count, advice)]
    return [durability, Finding("replicas", "ok", count)]


async def _bucket_finding(store: "S3LeaseStore") -> Finding:
    names = await store.applications()
    found = f"GetObject and ListBucket are allowed; {counted(len(names), 'application')} found"
    return Finding("bucket", "ok", found, "a worker also needs PutObject; doctor writes nothing")


def _versions() -> Finding:
    import botocore

    from anabranch._wire import aggregate

    codecs = "pure Python" if aggregate.__file__.endswith(".py") else "compiled"
    versions = f"anabranch {__version__}, Python {platform.python_version()}, botocore {botocore.__version__}"
    return Finding("versions", "ok", f"{versions}; aggregate codecs: {codecs}")


async def _endpoint(address: "ServiceAddress") -> tuple[Finding, Finding]:
    from anabranch._aws.service import probe

    where = address.endpoint.url if address.proxy is None else f"{address.endpoint.url} through {address.proxy!r}"
    try:
        answer = await probe(address)
    except AnabranchError as error:
        advice = "AWS needs internet access, a proxy or a VPC endpoint; anabranch serve starts a local endpoint"
        clock = Finding("clock", "skip", "needs an endpoint that responds")
        return Finding("endpoint", "fail", one_line(error), advice), clock
    speed = f"{where} responds in {answer.round_trip_ms} ms, including the time to connect"
    if answer.round_trip_ms > _SLOW_RESPONSE_MS:
        found = Finding("endpoint", "warn", speed, "check the region and the network")
    else:
        found = Finding("endpoint", "ok", speed)
    return found, _clock(answer.clock_ahead_ms)


def _clock(ahead_ms: int | None) -> Finding:
    if ahead_ms is None:
        return Finding("clock", "skip", "the response has no Date header")
    if abs(ahead_ms) <= _CLOCK_SKEW_WARNING_MS:
        return Finding("clock", "ok", "in sync with the service's clock")
    off = f"{abs(ahead_ms) / 1000:.1f} s {'ahead of' if ahead_ms > 0 else 'behind'} the service's clock"
    advice = "synchronize it with NTP (chrony, systemd-timesyncd)"
    if abs(ahead_ms) < _CLOCK_SKEW_MAX_MS:
        return Finding("clock", "warn", off, advice)
    return Finding("clock", "fail", off, f"{advice}: AWS rejects signatures that are more than five minutes off")


async def _limits(control: "KinesisControl") -> Finding:
    try:
        limits = await control.describe_limits()
    except AnabranchError as error:
        return _failure("limits", "DescribeLimits", error, only_for="this check")
    counts = f"{limits.open_shard_count} of {limits.shard_count_max} shards are open in this account and region"
    if limits.on_demand_stream_count_max is not None:
        counts += f", {limits.on_demand_stream_count} of {limits.on_demand_stream_count_max} on-demand streams"
    if limits.open_shard_count >= _QUOTA_WARNING_SHARE * limits.shard_count_max:
        advice = "request a higher quota before you split shards (Service Quotas, Kinesis)"
        return Finding("limits", "warn", counts, advice)
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
            return Finding(check, "warn", one_line(error), f"{advice} (only {only_for} needs it)")
        return Finding(check, "fail", one_line(error), advice)
    if isinstance(error, StreamNotFoundError):
        return Finding(check, "fail", one_line(error), "run anabranch streams ls to list the streams")
    return Finding(check, "fail", one_line(error))


_EXAMPLES: Final = """\
examples:
  anabranch doctor
  anabranch doctor orders --profile production
  anabranch doctor orders --app billing --leases dynamodb://
  anabranch doctor --json | jq '.[] | select(.state == "fail")'

Changes nothing in AWS. The exit code is 1 if a check failed; warnings and
skipped checks do not count. A role that may only read fails at `writing`.
"""
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run)
    stream = "also check this stream and the permissions on it"
    parser.add_argument("stream", nargs="?", type=stream_argument, metavar="STREAM", help=stream)
    app = "also check the lease store of this application"
    parser.add_argument("--app", type=application_argument, metavar="NAME", help=app)
    add_leases_option(parser, "lease store of the application", default=DEFAULT_LEASES)
    add_json_option(parser)
    add_aws_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    checkup = Checkup(arguments, None if arguments.json else make_console())
    asyncio.run(checkup.run())
    if arguments.json:
        print_json(checkup.findings)
    return FAILED if any(finding.state == "fail" for finding in checkup.findings) else DONE


def _print(finding: Finding, console: "Console") -> None:
    indent = " " * 17
    first, *others = wrapped(finding.finding, console, indent=indent)
    if finding.advice is not None:
        others += wrapped(f"-> {finding.advice}", console, indent=indent, hanging="   ")
    line = styled("").append(f"{finding.state:<5}", _STYLES[finding.state]).append(f"{finding.check:<12}", "bold")
    for shown in (line.append(first.removeprefix(indent)), *map(styled, others)):
        console.print(shown, soft_wrap=True)

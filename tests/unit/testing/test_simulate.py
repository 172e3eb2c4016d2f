import asyncio

import pytest

from anabranch import Consumer, DeadLetter, Retry, Skip, Stop, testing
from anabranch.testing import ManualClock, make_record, simulate

ORDERS = [(f"user-{number % 7}", str(number).encode()) for number in range(120)]


def test_a_handler_sees_every_record_once_where_nothing_goes_wrong():
    seen = []

    async def handle(record):
        await asyncio.sleep(0.05)
        seen.append(int(record.data))

    report = simulate(handle, ORDERS)
    report.check()
    assert sorted(seen) == list(range(120))
    assert (report.record_count, report.finished_count, report.repeated_count) == (120, 120, 0)


def test_a_handler_sees_every_record_of_a_key_in_order_whatever_goes_wrong():
    balances = {}

    async def handle(record):
        last = balances.get(record.partition_key, -1)
        number = int(record.data)
        assert number <= last or number == (last + 7 if last >= 0 else number % 7)
        balances[record.partition_key] = max(last, number)

    faults = ["crash", "cut_off", "lost_messages", "pause", "reshard", "stop", "throttle"]
    report = simulate(handle, ORDERS, seed=3, workers=3, order="key", faults=faults)
    report.check()
    assert set(balances.values()) == set(range(113, 120))


def test_the_same_seed_is_the_same_run():
    async def handle(record):
        await asyncio.sleep(0.1)

    runs = [simulate(handle, ORDERS, seed=5, faults=["crash", "reshard"]) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_handler_that_never_ends_is_reported_with_the_seed():
    async def handle(record):
        if record.data == b"60":
            await asyncio.get_running_loop().create_future()

    report = simulate(handle, ORDERS, seed=9)
    with pytest.raises(AssertionError, match=r"never finished.*seed=9"):
        report.check()


def test_a_handler_that_fails_for_good_is_reported():
    async def handle(record):
        if record.data == b"60":
            raise RuntimeError("poison")

    report = simulate(handle, ORDERS)
    assert "never finished" in report.violations[0]
    with pytest.raises(AssertionError, match=r"the handler failed 3 times, first with RuntimeError: poison \(.*\.py:"):
        report.check()


def test_a_failure_that_a_repetition_heals_breaks_no_promise():
    failed = []

    async def handle(record):
        if record.data == b"60" and not failed:
            failed.append(record)
            raise TimeoutError

    report = simulate(handle, ORDERS)
    report.check()
    assert report.failure.startswith("the handler failed once, first with TimeoutError")


def test_a_handler_gets_what_a_consumer_would_give_it():
    totals = {}

    async def handle(record, context):
        assert context.fence_token > 0
        totals[record.partition_key] = totals.get(record.partition_key, 0) + record.value["amount"]

    simulate(handle, [("ann", b'{"amount": 3}'), ("ann", b'{"amount": 4}')], decode=dict).check()
    assert totals == {"ann": 7}


def test_a_plain_function_is_refused_with_what_to_do():
    def handle(record): ...

    with pytest.raises(ValueError, match="handle is a plain function, which would need a thread; pass an async"):
        simulate(handle, ORDERS)


def test_an_unknown_fault_names_the_known_ones():
    async def handle(record): ...

    with pytest.raises(ValueError, match="crash, cut_off, lost_messages"):
        simulate(handle, ORDERS, faults=["crashes"])


def test_a_record_for_a_unit_test_has_all_that_a_handler_looks_at():
    record = make_record(b"{}", "user-1", value={"amount": 3})
    assert (record.data, record.partition_key, record.value) == (b"{}", "user-1", {"amount": 3})
    assert make_record(b"x").value == b"x"
    assert record.position.sequence_number > 0


def test_the_public_names_are_there_and_others_are_not():
    assert testing.ManualClock is ManualClock
    assert all(getattr(testing, name) is not None for name in testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018 -- the look-up is the test


def test_a_script_says_what_happens_when():
    shards = set()

    async def handle(record):
        shards.add(record.shard_id)

    orders = [(f"user-{n}", b"") for n in range(300)]
    script = [(5.0, "split"), (10.0, "merge"), (12.0, "crash"), (15.0, "stop"), (18.0, "pause"), (20.0, "cut_off")]
    report = simulate(handle, orders, shards=1, workers=2, script=script, seed=5)
    report.check()
    assert shards == {f"shardId-00000000000{index}" for index in range(4)}


def test_an_unknown_action_of_a_script_names_the_known_ones():
    with pytest.raises(ValueError, match="split"):
        simulate(None, [], script=[(1.0, "earthquake")])


def test_options_that_a_consumer_has_itself_are_refused_instead_of_ignored():
    message = "a consumer is simulated with its own decode, order: pass them to Consumer, or pass a handler"
    with pytest.raises(ValueError, match=message):
        simulate(poisoned_consumer(Skip()), NUMBERS, order="key", decode=dict)


def poisoned_consumer(then, *, is_batch=False):
    consumer = Consumer("orders", app="billing", decode=int, on_failure=Retry(attempts=2, backoff=0.01, then=then))

    async def handle(item):
        for record in getattr(item, "records", [item]):
            if record.value == 7:
                raise LookupError("no such customer")

    if is_batch:
        consumer.batch_handler(max_wait=0.1)(handle)
    else:
        consumer.handler(handle)
    return consumer


NUMBERS = [(f"user-{n % 3}", str(n).encode()) for n in range(20)]


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("then, outcome", [(Stop(), "stops"), (Skip(), "skipped"), (DeadLetter(), "dead-lettered")])
def test_a_consumer_is_simulated_with_its_own_handler_and_policy(then, outcome, is_batch):
    consumer = poisoned_consumer(then, is_batch=is_batch)
    report = simulate(consumer, NUMBERS, seed=1, seconds=5, faults=["crash"], expect={7: outcome})
    report.check()
    assert report.outcomes == {7: outcome}


def test_a_record_that_never_ends_is_reported_beside_a_shard_that_is_expected_to_stop():
    async def handle(record):
        if record.data == b"7":
            raise LookupError("no such customer")
        if record.data == b"8":
            await asyncio.get_running_loop().create_future()

    report = simulate(handle, NUMBERS, seconds=5, expect={7: "stops"}, on_failure=Retry(attempts=1))
    assert report.outcomes == {7: "stops"}
    assert report.violations == ("4 records were never finished, the first is record 8",)


def test_the_children_of_a_shard_that_is_expected_to_stop_may_keep_their_records():
    async def handle(record):
        if record.data == b"7":
            raise LookupError("no such customer")

    orders = [(f"user-{n % 20}", str(n).encode()) for n in range(60)]
    expected, last = {7: "stops"}, Retry(attempts=1)
    report = simulate(handle, orders, shards=1, seconds=9, script=[(4, "split")], expect=expected, on_failure=last)
    report.check()
    assert report.finished_count < 40


@pytest.mark.parametrize("max_records", [3, 30])
def test_a_batch_handler_gets_the_batches_that_it_is_registered_for(max_records):
    consumer = Consumer("orders", app="billing")
    sizes = []

    @consumer.batch_handler(max_records=max_records, max_wait=5.0)
    async def handle(batch):
        sizes.append(len(batch.records))

    records = [("anna", str(number).encode()) for number in range(60)]
    simulate(consumer, records, seconds=1, workers=1, shards=1).check()
    assert max(sizes) == max_records


def test_a_skipped_record_is_a_violation_only_if_outcomes_are_expected():
    simulate(poisoned_consumer(Skip()), NUMBERS, seconds=5).check()
    report = simulate(poisoned_consumer(Skip()), NUMBERS, seconds=5, expect={})
    assert report.violations == ("record 7 should have the outcome 'handled', and has 'skipped'",)


def test_another_outcome_than_the_expected_one_is_a_violation():
    report = simulate(poisoned_consumer(Skip()), NUMBERS, seconds=5, expect={3: "dead-lettered"})
    assert report.violations == (
        "record 3 should have the outcome 'dead-lettered', and has 'handled'",
        "record 7 should have the outcome 'handled', and has 'skipped'",
    )

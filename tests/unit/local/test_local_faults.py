import random

import msgspec
import pytest

from anabranch.local.faults import NO_FAULT, Fault, Faults

NOW_MS = 1_794_000_000_000


@pytest.fixture
def faults():
    return Faults(random.Random(7))


def plan(faults, operation="PutRecords", *, stream="orders", slot_count=5):
    return faults.plan(operation, stream=stream, slot_count=slot_count, now_ms=NOW_MS)


def test_without_rules_nothing_happens(faults):
    assert faults.is_empty
    assert plan(faults) is NO_FAULT


@pytest.mark.parametrize("operation", ["PutRecrods", "", "putrecords"])
def test_an_operation_that_does_not_exist_is_refused_with_the_list(faults, operation):
    with pytest.raises(ValueError, match=r"unknown operation.*PutRecords"):
        faults.on(operation).throttle()
    with pytest.raises(msgspec.ValidationError, match=r"unknown operation.*PutRecords"):
        msgspec.json.decode(msgspec.json.encode({"fault": "throttle", "operation": operation}), type=Fault)
    assert faults.is_empty


def test_chosen_slots_are_throttled_once(faults):
    rule = faults.on("PutRecords").throttle(slots=[1, 3, 99]).once()
    assert plan(faults, "GetRecords") is NO_FAULT
    assert plan(faults).refused_slots == dict.fromkeys((1, 3), "ProvisionedThroughputExceededException")
    assert plan(faults) is NO_FAULT
    assert (rule.matched, rule.struck, rule.spent) == (1, 1, True)


def test_slots_may_fail_by_chance_and_with_another_code(faults):
    faults.on("PutRecords").throttle(slot_probability=0.5)
    faults.on("PutRecords").error("InternalFailure", slots=[0])
    slots = plan(faults, slot_count=1_000).refused_slots
    assert 400 < len(slots) < 600
    assert slots[0] == "InternalFailure"


def test_the_same_seed_gives_the_same_faults():
    def run(seed):
        faults = Faults(random.Random(seed))
        faults.on("GetRecords").fail().with_probability(0.5)
        return [plan(faults, "GetRecords").refusal is not None for _ in range(100)]

    assert run(1) == run(1) != run(2)


def test_a_rule_can_skip_calls_and_can_stop(faults):
    faults.on().fail(503, "ServiceUnavailable", "later").after(2).at_most(2)
    refusals = [plan(faults).refusal for _ in range(6)]
    assert [refusal and refusal.status for refusal in refusals] == [None, None, 503, 503, None, None]


def test_a_rule_can_apply_to_one_stream(faults):
    faults.on("PutRecords", stream="orders").throttle()
    assert plan(faults, stream="other") is NO_FAULT
    assert plan(faults, stream=None) is NO_FAULT
    assert plan(faults).refusal.code == "ProvisionedThroughputExceededException"


@pytest.mark.parametrize(
    "script, expected",
    [
        (lambda on: on.time_out(), {"loss_after": "silence"}),
        (lambda on: on.lose_response(), {"loss_after": "hang_up"}),
        (lambda on: on.drop(), {"loss_before": "hang_up"}),
        (lambda on: on.half_open(), {"loss_before": "silence"}),
        (lambda on: on.drop(events=3), {"loss_after": "hang_up", "events": 3}),
        (lambda on: on.fall_silent(events=2), {"loss_after": "silence", "events": 2}),
        (lambda on: on.delay(1.5), {"delay_ms": 1_500}),
    ],
)
def test_each_fault_has_its_own_effect(faults, script, expected):
    script(faults.on("SubscribeToShard"))
    planned = plan(faults, "SubscribeToShard")
    changed = {
        name: getattr(planned, name)
        for name in ("delay_ms", "loss_before", "loss_after", "events")
        if getattr(planned, name) != getattr(NO_FAULT, name)
    }
    assert changed == expected


def test_delays_add_up_and_the_first_rule_that_ends_the_call_decides_how(faults):
    faults.on().delay(1)
    faults.on().delay(0.5)
    second = faults.on().expire_iterator()
    third = faults.on().drop()
    planned = plan(faults, "GetRecords")
    assert planned.delay_ms == 1_500
    assert planned.refusal.code == "ExpiredIteratorException"
    assert "tolerated delay of 300000 milliseconds" in planned.refusal.message
    assert planned.loss_before is None
    assert (second.struck, third.struck) == (1, 0)


def test_resource_in_use_is_awss_error(faults):
    faults.on("SubscribeToShard").resource_in_use()
    assert plan(faults, "SubscribeToShard").refusal.code == "ResourceInUseException"


def test_rules_can_be_removed(faults):
    kept, removed = faults.on().delay(1), faults.on().delay(1)
    faults.remove(removed)
    assert faults.rules == (kept,)
    faults.clear()
    assert faults.is_empty


def test_a_rule_is_json_and_unknown_fields_are_rejected():
    rule = msgspec.json.decode(b'{"fault": "throttle", "operation": "PutRecords", "slots": [1]}', type=Fault)
    assert rule.slots == [1]
    for wrong in (
        b'{"fault": "explode"}',
        b'{"fault": "drop", "tmes": 1}',
        b'{"fault": "drop", "times": 0}',
        b'{"fault": "drop", "probability": 1.5}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=Fault)


def test_a_probability_above_one_is_rejected(faults):
    with pytest.raises(ValueError, match="between 0 and 1"):
        faults.on().drop().with_probability(2)

"""A fleet agrees on one consumer per stream, whichever worker starts first and whichever messages are lost."""

import itertools
import random

import pytest

from anabranch._core.reading.registration import (
    REMOVING_MS_MAX,
    is_own_name,
    may_remove,
    next_step,
    own_name,
)
from anabranch._model.leases import FanOutConsumer
from anabranch._wire.messages import ConsumerDescription
from anabranch.config import FanOutSettings

NAME = "billing"
ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders/consumer/billing:1700000000"


def described(status, arn=ARN):
    return ConsumerDescription(NAME, arn, status, 1_700_000_000.0)


def row(state, arn=ARN, name=NAME):
    return FanOutConsumer(name=name, arn=arn, state=state)


def step(stored, found, *, waited_ms=0, is_own=False):
    return next_step(NAME, stored, found, waited_ms=waited_ms, is_own=is_own)


def test_a_known_consumer_costs_no_call():
    assert step(row("registered"), "unknown") == step(row("found"), "unknown") == "ready"


def test_the_intention_is_written_before_the_consumer_is_registered():
    assert step(None, "unknown") == "look"
    assert step(None, "missing") == FanOutConsumer(name=NAME, state="registering")
    assert step(row("registering", ""), "missing") == "register"
    assert step(row("registering", ""), described("CREATING")) == "look_again"
    assert step(row("registering", ""), described("ACTIVE")) == row("registered")


def test_a_consumer_that_was_there_before_is_never_removed():
    assert step(None, described("ACTIVE")) == row("found")
    assert not may_remove(row("found"), NAME)
    assert may_remove(row("registered"), NAME)
    assert not may_remove(row("registered"), "another")
    assert not may_remove(None, NAME)


def test_a_consumer_with_the_application_s_own_name_is_its_own_even_if_the_row_was_lost():
    assert step(None, described("ACTIVE"), is_own=True) == row("registered")


@pytest.mark.parametrize("stored", [None, row("registering", ""), row("registered"), row("found")])
def test_a_consumer_that_is_being_deleted_is_waited_for(stored):
    assert step(stored, described("DELETING")) == "look_again"


def test_a_consumer_that_was_deleted_under_the_fleet_is_registered_again():
    assert step(row("registered"), "missing") == FanOutConsumer(name=NAME, state="registering")


def test_a_consumer_that_was_deleted_and_registered_again_elsewhere_has_another_arn():
    other = ARN.replace("1700000000", "1700009999")
    assert step(row("found"), described("ACTIVE", other)) == row("found", other)


def test_a_joining_worker_waits_for_one_that_removes_the_consumer_but_not_for_a_dead_one():
    for found in ("unknown", "missing", described("ACTIVE")):
        assert step(row("removing"), found) == "look_again"
        assert step(row("removing"), found, waited_ms=REMOVING_MS_MAX) == row("registering")


def test_another_configured_name_is_registered_beside_the_old_one():
    assert step(row("registered", name="before"), "missing") == FanOutConsumer(name=NAME, state="registering")


@pytest.mark.parametrize("app", ["billing", "a/b c", "x" * 128, "ä"])
def test_own_names_are_valid_and_recognised(app):
    name = own_name(app, "0123456789abcdef")
    FanOutSettings(consumer_name=name)
    assert name.endswith("-01234567")
    assert is_own_name(name)
    assert is_own_name(own_name(None, "0123456789abcdef"))
    assert not is_own_name("letter-asl-service-local")


def test_own_names_of_two_applications_differ():
    assert own_name("billing", "00000000") != own_name("billing", "00000001")


class Service:
    """A consumer that is registered once, takes some looks to be ACTIVE, and may be deleted by an operator."""

    def __init__(self):
        self.status = "missing"
        self.registered = 0

    def look(self):
        if self.status == "CREATING":
            self.status = "ACTIVE"
            return described("CREATING")
        if self.status == "DELETING":
            self.status = "missing"
            return described("DELETING")
        return self.status if self.status == "missing" else described(self.status)

    def register(self):
        if self.status == "missing":
            self.status = "CREATING"
            self.registered += 1


@pytest.mark.parametrize("seed", range(200))
def test_workers_that_start_together_in_any_order_get_one_consumer(seed):
    dice = random.Random(seed)
    service, stored, version = Service(), dice.choice([None, row("registering", ""), row("removing")]), 0
    service.status = dice.choice(["missing", "DELETING", "CREATING", "ACTIVE"])

    def worker():
        nonlocal stored, version
        found, waited_ms = "unknown", 0
        while True:
            seen, seen_version = stored, version
            yield
            planned = step(seen, found, waited_ms=waited_ms)
            match planned:
                case "ready":
                    return
                case "look":
                    found = service.look()
                case "look_again":
                    waited_ms += 1_000
                    found = service.look()
                case "register":
                    service.register()
                    found = "unknown" if dice.random() < 0.5 else service.look()
                case FanOutConsumer():
                    yield
                    if version == seen_version:  # a conditional write
                        stored, version = planned, version + 1
                    found = "unknown"

    workers = [worker() for _ in range(4)]
    for count in itertools.count():
        assert count < 5_000, "they do not come to an end"
        if not workers:
            break
        chosen = dice.choice(workers)
        try:
            next(chosen)
        except StopIteration:
            workers.remove(chosen)
    assert stored.state in {"registered", "found"}
    assert stored.arn == ARN
    assert service.registered <= 1

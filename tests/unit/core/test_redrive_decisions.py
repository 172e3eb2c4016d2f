"""What a redrive decides: filters, groups, what holds a key back, how a failure is counted."""

from msgspec.structs import replace

from anabranch._core.redrive import (
    LetterFilter,
    RedriveReport,
    RedriveTally,
    begin_delivery,
    failed_again,
    group_letters,
    order_key,
)
from anabranch.letters import Failure
from letter_samples import CREATED, a_letter

FAILURE = Failure(error_type="KeyError", message="gone", stack="...", fingerprint="abcd")


def test_a_filter_without_values_takes_every_letter_and_each_value_narrows_it():
    letter = a_letter(7, key="anna")
    assert LetterFilter().matches(letter)
    assert LetterFilter(fingerprint="value", key="anna", letter=letter.idempotency_key[:6]).matches(letter)
    for other in ({"fingerprint": "key"}, {"key": "ann"}, {"letter": "x"}):
        assert not LetterFilter(**other).matches(letter)


def test_a_time_span_has_its_start_and_not_its_end():
    letter, at = a_letter(7), CREATED + 107
    assert LetterFilter(since_seconds=at, until_seconds=at + 1).matches(letter)
    assert not LetterFilter(until_seconds=at).matches(letter)
    assert not LetterFilter(since_seconds=at + 1).matches(letter)


def test_groups_are_by_fingerprint_the_largest_first():
    letters = [a_letter(n, key=f"k{n % 2}", message=f"no {n}") for n in range(3)] + [a_letter(9, kind="KeyError")]
    first, second = group_letters([letters[3], *letters])
    assert (first.fingerprint, first.count, first.keys, first.message) == ("valueerror", 3, 2, "no 2")
    assert (first.first_seconds, first.last_seconds) == (CREATED + 100, CREATED + 102)
    assert (second.error_type, second.count, second.redriven) == ("KeyError", 2, 0)


def test_a_letter_that_failed_again_counts_on_and_tells_the_last_failure():
    letter = failed_again(begin_delivery(a_letter()), FAILURE, (8.0, 9.0))
    assert (letter.attempts, letter.attempted_seconds) == (5, (1.0, 2.0, 3.0, 8.0, 9.0))
    assert (letter.redrive_count, letter.message, letter.fingerprint) == (1, "gone", "abcd")
    assert (letter.payload, letter.redrives_cut_off) == (a_letter().payload, 0)


def test_a_letter_that_stays_holds_back_the_later_ones_of_its_key_only():
    tally = RedriveTally()
    tally.settle(a_letter(1, key="anna"), "failed", "KeyError: gone")
    assert tally.is_held(a_letter(2, key="anna"))
    assert not tally.is_held(a_letter(2, key="bob"))
    assert not tally.is_held(a_letter(2, key="anna", stream="other"))
    tally.settle(a_letter(3, key="carl"), "reviewed")
    assert not tally.is_held(a_letter(4, key="carl"))


def test_letters_without_a_key_do_not_wait_for_each_other():
    one, two = (replace(a_letter(n), partition_key=None) for n in (1, 2))
    assert order_key(one) != order_key(two)


def test_a_report_is_complete_if_no_letter_is_left():
    tally = RedriveTally()
    for letter in (a_letter(1), a_letter(2)):
        tally.add()
        tally.settle(letter, "delivered")
    assert tally.report() == RedriveReport(matched=2, delivered=2)
    assert tally.report().is_complete
    tally.add()
    tally.settle(a_letter(3), "without_payload", None)
    assert not tally.report(1).is_complete

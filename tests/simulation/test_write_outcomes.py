"""The checker of a producer's outcomes accepts true ones and finds false ones."""

from write_outcomes import WriteOutcomes

from anabranch._model.streams import Position
from anabranch.records import Attempt, PutResult


def outcomes(*results, reads=(), keeps_order=True):
    """What is said of puts with these results, and of a stream that then holds these."""
    checker = WriteOutcomes(keeps_order=keeps_order)
    for result in results:
        checker.put(result.data, result.partition_key)
    for result in results:
        checker.told(1, result)
    for number, data in reads:
        checker.read(data, "P", Position(number))
    checker.ended(9)
    return [violation.what for violation in checker.violations]


def put_result(data, number=None, *, maybe_written=False, hash_key=None):
    delivered = number is not None
    attempt = Attempt(started_seconds=0.0, duration_seconds=0.0, code=None if delivered else "Oops", message=None)
    return PutResult(
        stream="orders", partition_key="k", data=data, explicit_hash_key=hash_key, maybe_written=maybe_written,
        shard_id="P" if delivered else None, sequence_number=str(number) if delivered else None, attempts=(attempt,),
    )  # fmt: skip


def test_true_outcomes_are_believed():
    open_end = put_result(b"c", maybe_written=True)
    assert outcomes(put_result(b"a", 1), put_result(b"b"), open_end, reads=[(1, b"a"), (2, b"c"), (3, b"a")]) == []


def test_false_outcomes_are_found():
    assert "was reported at" in outcomes(put_result(b"a", 1), reads=[(2, b"a")])[0]
    assert "was reported as failed, but is at" in outcomes(put_result(b"a"), reads=[(2, b"a")])[0]


def test_a_put_without_an_outcome_or_with_two_is_found():
    checker = WriteOutcomes(keeps_order=True)
    checker.put(b"a", "k")
    checker.put(b"b", "k")
    checker.told(1, put_result(b"b"))
    checker.told(2, put_result(b"b"))
    checker.ended(9)
    assert [violation.what for violation in checker.violations] == [
        "b'b' has two outcomes",
        "b'a' has no outcome",
    ]


def test_a_refused_put_leaves_nothing_in_the_stream():
    checker = WriteOutcomes(keeps_order=True)
    checker.put(b"a", "k")
    checker.refused(b"a")
    checker.ended(8)
    assert checker.violations == []
    checker.read(b"a", "P", Position(1))
    checker.ended(9)
    assert "was refused, but is at" in checker.violations[0].what


def test_writes_out_of_order_are_found_where_order_is_kept():
    swapped = {"reads": [(1, b"b"), (2, b"a")]}
    assert "is in the stream before b'a'" in outcomes(put_result(b"a", 2), put_result(b"b", 1), **swapped)[0]
    assert outcomes(put_result(b"a", 2), put_result(b"b", 1), keeps_order=False, **swapped) == []
    assert outcomes(put_result(b"a", 2), put_result(b"b", 1, hash_key="7"), **swapped) == []

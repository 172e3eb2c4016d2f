from anabranch._http.client.connection import ReceiveBuffers


def test_a_buffer_that_was_given_back_is_lent_again():
    buffers = ReceiveBuffers(10_000)
    first = buffers.borrow(1_000)
    assert len(first) >= 1_000
    buffers.give_back(first)
    assert buffers.borrow(900) is first
    assert not buffers._kept


def test_the_last_one_that_is_large_enough_is_lent():
    buffers = ReceiveBuffers(100_000)
    small, large = buffers.borrow(100), buffers.borrow(5_000)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.borrow(2_000) is large
    assert buffers.borrow(50) is small


def test_no_more_is_kept_than_allowed_and_the_oldest_goes_first():
    buffers = ReceiveBuffers(2_500)
    lent = [buffers.borrow(1_000) for _ in range(4)]
    for buffer in lent:
        buffers.give_back(buffer)
    assert sum(map(len, buffers._kept)) <= 2_500
    assert buffers.borrow(1_000) is lent[3]
    huge = buffers.borrow(5_000)
    buffers.give_back(huge)
    assert not buffers._kept

"""The life of a held shard: every move that the table has, and no other."""

import pytest

from anabranch._core.reading.lifecycle import TRANSITIONS, next_phase

LEGAL = {
    ("reading", "end"): "ended",
    ("reading", "stop"): "stopped",
    ("reading", "lose"): "lost",
    ("ended", "finish"): "finished",
    ("ended", "stop"): "stopped",
    ("ended", "lose"): "lost",
    ("stopped", "lose"): "lost",
}


@pytest.mark.parametrize("phase", ["reading", "ended", "finished", "stopped", "lost"])
@pytest.mark.parametrize("move", ["end", "finish", "stop", "lose"])
def test_a_move_is_in_the_table_or_a_bug(phase, move):
    if (phase, move) in LEGAL:
        assert next_phase(phase, move) == LEGAL[phase, move]
    else:
        with pytest.raises(KeyError):
            next_phase(phase, move)


def test_finished_and_lost_are_final():
    assert [phase for phase, moves in TRANSITIONS.items() if not moves] == ["finished", "lost"]

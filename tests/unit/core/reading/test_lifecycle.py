"""The lifecycle of a held shard: every transition that the table has, and no other."""

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
@pytest.mark.parametrize("transition", ["end", "finish", "stop", "lose"])
def test_a_transition_is_in_the_table_or_a_bug(phase, transition):
    if (phase, transition) in LEGAL:
        assert next_phase(phase, transition) == LEGAL[phase, transition]
    else:
        with pytest.raises(KeyError):
            next_phase(phase, transition)


def test_finished_and_lost_are_final():
    assert [phase for phase, transitions in TRANSITIONS.items() if not transitions] == ["finished", "lost"]

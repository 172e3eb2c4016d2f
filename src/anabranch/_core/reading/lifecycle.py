"""The life of a held shard, as a table.

| phase     | meaning                                                        |
|-----------|----------------------------------------------------------------|
| reading   | it is read and its records are handed out                      |
| ended     | its last record was read; some may still be unfinished         |
| finished  | its last record is finished and its row says so: final         |
| stopped   | it stands still on purpose, its lease kept (rule D4)           |
| lost      | the lease is another's, was given away or released: final      |

An illegal move is a failed look-up: a bug, and said as one.
"""

from typing import Final, Literal

__all__ = ["Move", "Phase", "next_phase"]

Phase = Literal["reading", "ended", "finished", "stopped", "lost"]
Move = Literal["end", "finish", "stop", "lose"]

TRANSITIONS: Final[dict[Phase, dict[Move, Phase]]] = {
    "reading": {"end": "ended", "stop": "stopped", "lose": "lost"},
    "ended": {"finish": "finished", "stop": "stopped", "lose": "lost"},
    "stopped": {"lose": "lost"},
    "finished": {},
    "lost": {},
}


def next_phase(phase: Phase, move: Move) -> Phase:
    return TRANSITIONS[phase][move]

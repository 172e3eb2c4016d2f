"""The lifecycle of a held shard, as a table.

| phase     | meaning                                                        |
|-----------|----------------------------------------------------------------|
| reading   | it is read, and its records are handed out                     |
| ended     | its last record was read; some records may be unfinished       |
| finished  | all records are finished and the lease row says so; final      |
| stopped   | stopped at a record, its lease kept (rule D4)                  |
| lost      | the lease was lost, given away or released; final              |

An illegal move is a bug, and fails as a missing key.
"""

from typing import Final, Literal

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

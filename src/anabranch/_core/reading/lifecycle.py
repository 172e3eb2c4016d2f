"""The lifecycle of a held shard, as a table.

| phase     | meaning                                                        |
|-----------|----------------------------------------------------------------|
| reading   | the shard is read, and its records are handled                 |
| ended     | its last record was read; some records may be unfinished       |
| finished  | all records are finished, and the lease row says so; final     |
| stopped   | a record cannot be handled; the lease is kept (rule D4)        |
| lost      | the lease was lost, given away or released; final              |

A transition that is not in the table is a bug, and raises KeyError.
"""

from typing import Final, Literal

Phase = Literal["reading", "ended", "finished", "stopped", "lost"]
Transition = Literal["end", "finish", "stop", "lose"]

TRANSITIONS: Final[dict[Phase, dict[Transition, Phase]]] = {
    "reading": {"end": "ended", "stop": "stopped", "lose": "lost"},
    "ended": {"finish": "finished", "stop": "stopped", "lose": "lost"},
    "stopped": {"lose": "lost"},
    "finished": {},
    "lost": {},
}


def next_phase(phase: Phase, transition: Transition) -> Phase:
    return TRANSITIONS[phase][transition]

"""The promises as checkers, one a file: each watches what was written, started, finished and committed, and nothing
else.

They know nothing of how the engine works, so a mistake in it cannot also be in them.
"""

from anabranch.testing.checkers.checkpoint_advances import CheckpointAdvances
from anabranch.testing.checkers.children_first import ChildrenFirst
from anabranch.testing.checkers.duplicates import Duplicates
from anabranch.testing.checkers.journal import Call, Checker, Commit, Journal, ShardOpened, Violation, Written, place
from anabranch.testing.checkers.no_false_success import NoFalseSuccess
from anabranch.testing.checkers.no_loss import NoLoss
from anabranch.testing.checkers.no_overlap import NoOverlap, QuietTransfers
from anabranch.testing.checkers.no_standstill import NoStandstill
from anabranch.testing.checkers.one_birth import OneBirth
from anabranch.testing.checkers.one_owner import OneOwner
from anabranch.testing.checkers.order_per_key import OrderPerKey
from anabranch.testing.checkers.parents_first import ParentsFirst
from anabranch.testing.checkers.within_budget import WithinBudget
from anabranch.testing.checkers.write_outcomes import WriteOutcomes

__all__ = [
    "Call",
    "Checker",
    "CheckpointAdvances",
    "ChildrenFirst",
    "Commit",
    "Duplicates",
    "Journal",
    "NoFalseSuccess",
    "NoLoss",
    "NoOverlap",
    "NoStandstill",
    "OneBirth",
    "OneOwner",
    "OrderPerKey",
    "ParentsFirst",
    "QuietTransfers",
    "ShardOpened",
    "Violation",
    "WithinBudget",
    "WriteOutcomes",
    "Written",
    "all_checkers",
    "place",
]


def all_checkers(*, keeps_order: bool = True, commit_ms: int = 1_000) -> list[Checker]:
    """Every promise that a consumer's run can be held to; without that of order where none was asked for. What is
    finished is committed within `commit_ms`.
    """
    return [
        *([OrderPerKey()] if keeps_order else []),
        NoLoss(),
        Duplicates(commit_ms),
        OneOwner(),
        NoOverlap(),
        QuietTransfers(),
        OneBirth(),
        WithinBudget(),
        NoStandstill(),
        NoFalseSuccess(),
        ParentsFirst(),
        ChildrenFirst(),
        CheckpointAdvances(),
    ]

"""Where dead letters are kept, and how they are read, redriven and removed."""

from anabranch._core.redrive import LetterFilter, LetterGroup, RedriveReport
from anabranch.dead_letters.redrive import DeadLetters

__all__ = ["DeadLetters", "LetterFilter", "LetterGroup", "RedriveReport"]

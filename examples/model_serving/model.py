"""The model: 21 landmarks in, a letter and its confidence out. ONNX Runtime, one call for a whole batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from hands import JOINTS, LETTERS, Points

FILE = Path(__file__).with_name("letters.onnx")


class Prediction(NamedTuple):
    letter: str
    confidence: float


class LetterModel:
    def __init__(self, file: Path = FILE) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # a batch takes less than starting threads
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def predict(self, hands: Sequence[Points | Sequence[Sequence[float]]]) -> list[Prediction]:
        """Raises `ValueError` if a hand does not have 21 points of three finite numbers."""
        features = normalized(np.array(hands, dtype=np.float32))
        (probabilities,) = self._session.run(None, {"landmarks": features})
        best = probabilities.argmax(axis=1)
        return [
            Prediction(LETTERS[letter], float(row[letter])) for letter, row in zip(best, probabilities, strict=True)
        ]


def normalized(hands: Points) -> Points:
    """Puts the wrist at the origin and makes all hands the same size, so that place and distance do not matter."""
    if hands.ndim != 3 or hands.shape[1:] != (JOINTS, 3):
        raise ValueError(f"the landmarks have the shape {hands.shape[1:]}; a hand has {JOINTS} points (x, y, z)")
    centered = hands - hands[:, :1]
    size = np.linalg.norm(centered, axis=2).max(axis=1)
    if not np.isfinite(size).all() or (size < 1e-6).any():
        raise ValueError("the landmarks are not finite numbers, or all in one place")
    return (centered / size[:, None, None]).reshape(len(hands), -1)

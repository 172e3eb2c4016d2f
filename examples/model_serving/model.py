"""The model: 21 landmarks in, a letter and its confidence out. ONNX Runtime, one call for a whole batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from hands import LETTERS, Points, normalized

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

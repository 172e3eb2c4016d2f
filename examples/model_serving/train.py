"""Trains the model on hands that it generates, and writes letters.onnx: `python train.py`.

A small network in NumPy (63 numbers, two hidden layers, 24 letters), trained with Adam; it takes some seconds. Prints
the accuracy on hands that were not trained on. Only this script needs the package `onnx`.
"""

import itertools
from pathlib import Path

import numpy as np
import onnx
from hands import JOINTS, LETTERS, Points, sample
from model import FILE, LetterModel, normalized
from onnx import TensorProto, helper, numpy_helper

SIZES = (JOINTS * 3, 96, 64, len(LETTERS))
Weights = list[tuple[np.ndarray, np.ndarray]]


def generate(count_of_each: int, seed: int) -> tuple[Points, np.ndarray]:
    random = np.random.default_rng(seed)
    hands = [sample(letter, random) for letter in LETTERS for _ in range(count_of_each)]
    return normalized(np.array(hands)), np.repeat(np.arange(len(LETTERS)), count_of_each)


def forward(weights: Weights, values: np.ndarray) -> list[np.ndarray]:
    """The output of each layer; the last one has probabilities."""
    layers = [values]
    for number, (matrix, bias) in enumerate(weights):
        values = values @ matrix + bias
        if number < len(weights) - 1:
            values = np.maximum(values, 0)
        layers.append(values)
    exponents = np.exp(values - values.max(axis=1, keepdims=True))
    layers[-1] = exponents / exponents.sum(axis=1, keepdims=True)
    return layers


def train(inputs: np.ndarray, targets: np.ndarray, *, epochs: int = 25, rate: float = 1e-3) -> Weights:
    random = np.random.default_rng(1)
    weights: Weights = [
        (random.normal(0, np.sqrt(2 / before), (before, after)).astype(np.float32), np.zeros(after, np.float32))
        for before, after in itertools.pairwise(SIZES)
    ]
    moments = [[np.zeros_like(part) for part in layer] for layer in weights]
    squares = [[np.zeros_like(part) for part in layer] for layer in weights]
    step = 0
    for _ in range(epochs):
        order = random.permutation(len(inputs))
        for chosen in np.array_split(order, len(order) // 64):
            step += 1
            layers = forward(weights, inputs[chosen])
            error = layers[-1]
            error[np.arange(len(chosen)), targets[chosen]] -= 1
            error /= len(chosen)
            for number in reversed(range(len(weights))):
                gradients = (layers[number].T @ error, error.sum(axis=0))
                if number:
                    error = (error @ weights[number][0].T) * (layers[number] > 0)
                for part, gradient in enumerate(gradients):
                    moment, square = moments[number][part], squares[number][part]
                    moment += 0.1 * (gradient - moment)
                    square += 0.001 * (gradient**2 - square)
                    corrected = np.sqrt(square / (1 - 0.999**step)) + 1e-8
                    weights[number][part][...] -= rate * (moment / (1 - 0.9**step)) / corrected
    return weights


def export(weights: Weights, file: Path) -> None:
    nodes, constants, name = [], [], "landmarks"
    for number, (matrix, bias) in enumerate(weights):
        constants += [numpy_helper.from_array(matrix, f"w{number}"), numpy_helper.from_array(bias, f"b{number}")]
        nodes.append(helper.make_node("Gemm", [name, f"w{number}", f"b{number}"], [f"sum{number}"]))
        last = number == len(weights) - 1
        name = "probabilities" if last else f"layer{number}"
        nodes.append(helper.make_node("Softmax" if last else "Relu", [f"sum{number}"], [name]))
    graph = helper.make_graph(
        nodes,
        "letters",
        [helper.make_tensor_value_info("landmarks", TensorProto.FLOAT, ["hands", SIZES[0]])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["hands", SIZES[-1]])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, file)


def accuracy(model: LetterModel, count_of_each: int, seed: int) -> float:
    random = np.random.default_rng(seed)
    hands = [sample(letter, random) for letter in LETTERS for _ in range(count_of_each)]
    predictions = model.predict(hands)
    expected = [letter for letter in LETTERS for _ in range(count_of_each)]
    return sum(one.letter == letter for one, letter in zip(predictions, expected, strict=True)) / len(expected)


def main() -> None:
    weights = train(*generate(1_500, seed=1))
    export(weights, FILE)
    print(f"{FILE.name}: {FILE.stat().st_size / 1024:.0f} KB")
    print(f"accuracy on {200 * len(LETTERS):,} hands that were not trained on: {accuracy(LetterModel(), 200, 2):.1%}")


if __name__ == "__main__":
    main()

"""Hands as 21 landmarks, in MediaPipe's order: wrist, then four joints of thumb, index, middle, ring and little finger.

`pose(letter)` is the ideal right hand of one of the 24 letters that are signed without movement (all but J and Z).
`sample` adds what a camera adds: another size, place and angle, the left hand, noise. It knows no model.
"""

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float32]

LETTERS = "ABCDEFGHIKLMNOPQRSTUVWXY"
JOINTS = 21

# Per letter: how far index, middle, ring and little finger are bent (0 straight, 1 folded), how far they are spread,
# the thumb (bent, and its angle from the palm: 0 across, 1 outwards), and the turn of the whole hand in degrees.
POSES: dict[str, tuple[tuple[float, float, float, float], float, tuple[float, float], float]] = {
    "A": ((1.0, 1.0, 1.0, 1.0), 0.0, (0.1, 0.55), 0),
    "B": ((0.0, 0.0, 0.0, 0.0), 0.0, (0.8, 0.0), 0),
    "C": ((0.45, 0.45, 0.45, 0.45), 0.1, (0.4, 0.8), 0),
    "D": ((0.0, 0.75, 0.8, 0.85), 0.0, (0.6, 0.3), 0),
    "E": ((0.8, 0.8, 0.8, 0.8), 0.0, (1.0, 0.05), 0),
    "F": ((0.65, 0.0, 0.0, 0.0), 0.6, (0.6, 0.4), 0),
    "G": ((0.0, 1.0, 1.0, 1.0), 0.0, (0.0, 0.5), 90),
    "H": ((0.0, 0.0, 1.0, 1.0), 0.0, (0.7, 0.2), 90),
    "I": ((1.0, 1.0, 1.0, 0.0), 0.0, (0.7, 0.2), 0),
    "K": ((0.0, 0.3, 1.0, 1.0), 0.5, (0.1, 0.5), 0),
    "L": ((0.0, 1.0, 1.0, 1.0), 0.0, (0.0, 1.0), 0),
    "M": ((0.7, 0.7, 0.7, 1.0), 0.0, (0.9, -0.3), 0),
    "N": ((0.7, 0.7, 1.0, 1.0), 0.2, (0.9, -0.1), 0),
    "O": ((0.6, 0.6, 0.6, 0.6), 0.0, (0.65, 0.5), 0),
    "P": ((0.0, 0.3, 1.0, 1.0), 0.5, (0.1, 0.5), 160),
    "Q": ((0.0, 1.0, 1.0, 1.0), 0.0, (0.0, 0.6), 180),
    "R": ((0.0, 0.05, 1.0, 1.0), -0.5, (0.7, 0.15), 0),
    "S": ((1.0, 1.0, 1.0, 1.0), 0.0, (0.7, 0.05), 0),
    "T": ((0.85, 1.0, 1.0, 1.0), 0.3, (0.3, 0.3), 0),
    "U": ((0.0, 0.0, 1.0, 1.0), 0.0, (0.7, 0.1), 0),
    "V": ((0.0, 0.0, 1.0, 1.0), 0.9, (0.7, 0.1), 0),
    "W": ((0.0, 0.0, 0.0, 1.0), 0.7, (0.8, 0.05), 0),
    "X": ((0.4, 1.0, 1.0, 1.0), 0.0, (0.6, 0.2), 0),
    "Y": ((1.0, 1.0, 1.0, 0.0), 0.3, (0.0, 1.0), 0),
}

KNUCKLES = ((-0.30, 0.95), (-0.10, 1.00), (0.10, 0.95), (0.28, 0.85))  # of the four fingers, from the wrist
BONES = ((0.45, 0.28, 0.22), (0.50, 0.32, 0.24), (0.46, 0.30, 0.23), (0.36, 0.22, 0.19))
BENDS = (80.0, 100.0, 60.0)
"""Degrees that each joint of a folded finger is bent."""


def pose(letter: str) -> Points:
    """The ideal right hand: the wrist at the origin, the palm towards the camera, fingers up."""
    bends, spread, thumb, turn = POSES[letter]
    points = [(0.0, 0.0, 0.0), *_thumb(*thumb)]
    for number, (knuckle, bones, bend) in enumerate(zip(KNUCKLES, BONES, bends, strict=True)):
        points += _finger(knuckle, bones, bend, aside=(number - 1.5) * 12.0 * spread)
    return (np.array(points) @ _rotation(2, turn).T).astype(np.float32)


def _finger(knuckle: tuple[float, float], bones: tuple[float, ...], bend: float, aside: float) -> list[tuple]:
    """A finger bends towards the camera (z grows) and leans to one side by `aside` degrees."""
    at, angle, joints = np.array([*knuckle, 0.0]), 0.0, []
    joints.append(tuple(at))
    for bone, degrees in zip(bones, BENDS, strict=True):
        angle += np.radians(degrees * bend)
        direction = np.array([0.0, np.cos(angle), np.sin(angle)])
        at = at + bone * (_rotation(2, -aside) @ direction)
        joints.append(tuple(at))
    return joints


def _thumb(bend: float, outwards: float) -> list[tuple]:
    at, angle, joints = np.array([-0.22, 0.25, 0.05]), np.radians(10 + 80 * outwards), []
    joints.append(tuple(at))
    for bone, degrees in zip((0.38, 0.30, 0.26), (0.0, 45.0, 60.0), strict=True):
        angle -= np.radians(degrees * bend)
        at = at + bone * np.array([-np.sin(angle), np.cos(angle), 0.25 + 0.3 * bend])
        joints.append(tuple(at))
    return joints


def _rotation(axis: int, degrees: float) -> NDArray[np.float64]:
    sine, cosine = np.sin(np.radians(degrees)), np.cos(np.radians(degrees))
    first, second = (axis + 1) % 3, (axis + 2) % 3
    matrix = np.eye(3)
    matrix[first, first] = matrix[second, second] = cosine
    matrix[first, second], matrix[second, first] = -sine, sine
    return matrix


def sample(letter: str, random: np.random.Generator, *, noise: float = 0.06) -> Points:
    """The letter as a camera might see it: image coordinates between 0 and 1, y downwards."""
    points = pose(letter) + random.normal(0.0, noise, (JOINTS, 3))
    for axis, degrees in enumerate(random.normal(0.0, (14.0, 18.0, 10.0))):
        points = points @ _rotation(axis, degrees).T
    if random.random() < 0.5:  # the left hand
        points = points * (-1.0, 1.0, 1.0)
    size = random.uniform(0.10, 0.22)
    place = np.array([random.uniform(0.35, 0.65), random.uniform(0.55, 0.75), 0.0])
    return (points * (size, -size, size) + place).astype(np.float32)


def normalized(hands: Points) -> Points:
    """Puts the wrist at the origin and makes all hands the same size, so that place and distance do not matter. Raises
    `ValueError` if a hand does not have 21 points of three finite numbers, or all in one place.
    """
    if hands.ndim != 3 or hands.shape[1:] != (JOINTS, 3):
        raise ValueError(f"the landmarks have the shape {hands.shape[1:]}; a hand has {JOINTS} points (x, y, z)")
    centered = hands - hands[:, :1]
    size = np.linalg.norm(centered, axis=2).max(axis=1)
    if not np.isfinite(size).all() or (size < 1e-6).any():
        raise ValueError("the landmarks are not finite numbers, or all in one place")
    return (centered / size[:, None, None]).reshape(len(hands), -1)

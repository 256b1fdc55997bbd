"""Images of one coloured shape each, and questions about them that one word answers.

A scene is one of four shapes in one of six colours. It is painted at a random place and size on a dark, noisy
background, and asked for in three ways: ``What shape is it?``, ``What colour is it?`` and ``Is it a red circle?``. The
texts alone tell nothing of the answers: shapes and colours are equally likely, and so are yes and no.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from cordillera.errors import DataError

QuestionKind = Literal["shape", "colour", "both"]

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (0.85, 0.10, 0.10),
    "green": (0.10, 0.75, 0.15),
    "blue": (0.15, 0.25, 0.90),
    "yellow": (0.90, 0.85, 0.10),
    "white": (0.90, 0.90, 0.90),
    "purple": (0.60, 0.15, 0.75),
}
"""Red, green and blue of every colour, from 0 to 1."""

CHANCE: dict[QuestionKind, float] = {"shape": 1 / len(SHAPES), "colour": 1 / len(COLOURS), "both": 1 / 2}
"""Share of questions of each kind that is answered right, on average, without the image."""

SMALLEST = 16
"""Smallest side, in pixels, at which shapes can be distinguished."""

_SMALL, _LARGE = 0.2, 0.4  # half a shape's height, as a share of the image's side
_DARKEST, _BACKGROUND, _NOISE = 0.7, 0.15, 0.06  # least brightness of a shape; mean and deviation of the background


class ShapeScenes(NamedTuple):
    """Content of images.

    Attributes:
        shapes: Places in :data:`SHAPES`, ``int64 [I]``.
        colours: Places in :data:`COLOURS`, ``int64 [I]``.
    """

    shapes: np.ndarray
    colours: np.ndarray


class ShapeQuestion(NamedTuple):
    """A question about one image, whose answer is one word.

    Attributes:
        image: Number of the image.
    """

    kind: QuestionKind
    text: str
    answer: str
    image: int


def draw_scenes(count: int, random: np.random.Generator) -> ShapeScenes:
    """Draw ``count`` scenes with ``random``, every shape and every colour equally likely."""
    return ShapeScenes(random.integers(len(SHAPES), size=count), random.integers(len(COLOURS), size=count))


def paint(scenes: ShapeScenes, random: np.random.Generator, size: int = 32) -> np.ndarray:
    """Paint scenes.

    Args:
        scenes: ``I`` scenes.
        random: Source of places, sizes, brightness and noise.
        size: Height and width ``S`` of an image in pixels.

    Returns:
        Red, green and blue from 0 to 1, ``float32 [I, 3, S, S]``.

    Raises:
        DataError: If ``size`` is below :data:`SMALLEST`.
    """
    if size < SMALLEST:
        raise DataError(f"shapes cannot be told apart on {size} pixels", where="size", remedy=f"at least {SMALLEST}")
    count = len(scenes.shapes)
    radius = size * random.uniform(_SMALL, _LARGE, (count, 1, 1))
    rows, columns = (random.uniform(radius, size - radius) for _ in range(2))
    pixels = np.arange(size) + 0.5
    inside = _inside(scenes.shapes, (pixels[:, None] - rows) / radius, (pixels - columns) / radius)
    tones = np.array(list(COLOURS.values()))[scenes.colours] * random.uniform(_DARKEST, 1.0, (count, 1))
    noise = _NOISE * random.standard_normal((count, 3, size, size))
    images = np.where(inside[:, None], tones[:, :, None, None], _BACKGROUND) + noise
    return np.clip(images, 0.0, 1.0).astype(np.float32)


def ask(scenes: ShapeScenes, random: np.random.Generator) -> list[ShapeQuestion]:
    """Ask for the shape of every scene, for its colour, and for both: three questions for each of ``scenes``.

    ``random`` chooses whether a question for both is answered by yes; if it is not, the shape or the colour is another.
    """
    questions = []
    colours = list(COLOURS)
    for image, (shape, colour) in enumerate(zip(*(one.tolist() for one in scenes), strict=True)):
        asked_shape, asked_colour, answer = shape, colour, "yes"
        if random.random() < 0.5:
            answer = "no"
            if random.random() < 0.5:
                asked_shape = (shape + random.integers(1, len(SHAPES))) % len(SHAPES)
            else:
                asked_colour = (colour + random.integers(1, len(COLOURS))) % len(COLOURS)
        questions += [
            ShapeQuestion("shape", "What shape is it?", SHAPES[shape], image),
            ShapeQuestion("colour", "What colour is it?", colours[colour], image),
            ShapeQuestion("both", f"Is it a {colours[asked_colour]} {SHAPES[asked_shape]}?", answer, image),
        ]
    return questions


def draw_shapes(count: int, seed: int | Sequence[int], size: int = 32) -> tuple[np.ndarray, list[ShapeQuestion]]:
    """Draw images and the questions about them.

    Args:
        count: Number of images ``I``.
        seed: Seed, of one or several numbers; the same seed gives the same images and questions.
        size: Height and width ``S`` of an image in pixels.

    Returns:
        Images ``float32 [I, 3, S, S]``, and three questions for each.

    Raises:
        DataError: If ``size`` is below :data:`SMALLEST`.
    """
    random = np.random.default_rng(seed)
    scenes = draw_scenes(count, random)
    return paint(scenes, random, size), ask(scenes, random)


def _inside(shapes: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return which pixels belong to the shapes, ``bool [I, S, S]``.

    ``y [I, S, 1]`` and ``x [I, 1, S]`` are distances from the middle, 1 at the edge.
    """
    high, wide = np.abs(y), np.abs(x)
    drawn = (
        y * y + x * x <= 1,
        np.maximum(high, wide) <= 0.85,
        (high <= 1) & (wide <= (y + 1) / 2),  # its tip is at the top
        (np.maximum(high, wide) <= 1) & (np.minimum(high, wide) <= 0.3),
    )
    return np.choose(shapes[:, None, None], drawn)

"""Images of shapes: what is painted is what is asked for, and texts alone tell nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy.ndimage import median_filter

from cordillera.data.language.shape_images import (
    CHANCE,
    COLOURS,
    SHAPES,
    ShapeScenes,
    draw_shapes,
    paint,
)
from cordillera.errors import DataError


def test_a_seed_gives_the_same_images_and_questions() -> None:
    images, questions = draw_shapes(20, 7)
    again, asked = draw_shapes(20, 7)
    assert np.array_equal(images, again)
    assert questions == asked
    assert images.dtype == np.float32
    assert images.shape == (20, 3, 32, 32)
    assert 0 <= images.min() < images.max() <= 1
    for seed in (8, [7, 1]):
        assert not np.array_equal(images, draw_shapes(20, seed)[0])


def test_every_image_has_three_questions_whose_answers_agree() -> None:
    _, questions = draw_shapes(200, 1)
    assert [one.image for one in questions] == [image for image in range(200) for _ in range(3)]
    for shape, colour, both in zip(questions[::3], questions[1::3], questions[2::3], strict=True):
        assert (shape.kind, colour.kind, both.kind) == ("shape", "colour", "both")
        assert shape.answer in SHAPES
        assert colour.answer in COLOURS
        is_it = both.text == f"Is it a {colour.answer} {shape.answer}?"
        assert both.answer == ("yes" if is_it else "no")


def test_texts_alone_tell_nothing() -> None:
    """Answers are as likely as chance says, whatever the text; 5 deviations are allowed."""
    _, questions = draw_shapes(3000, 2)
    for kind, chance in CHANCE.items():
        answers = Counter(one.answer for one in questions if one.kind == kind)
        assert len(answers) == round(1 / chance)
        deviation = (3000 * chance * (1 - chance)) ** 0.5
        assert all(abs(count - 3000 * chance) < 5 * deviation for count in answers.values())
    yes, no = (Counter(one.text for one in questions if one.answer == word) for word in ("yes", "no"))
    assert len(yes | no) == len(SHAPES) * len(COLOURS)
    for text in yes | no:
        asked = yes[text] + no[text]
        assert abs(yes[text] - asked / 2) < 5 * (asked / 4) ** 0.5, text


@pytest.mark.parametrize("colour", range(len(COLOURS)))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_the_shape_that_is_painted_is_the_one_that_is_asked_for(shape: int, colour: int) -> None:
    """Recognised without learning: bright pixels, the nearest colour, and the share of their box that is covered."""
    count = 20
    scenes = ShapeScenes(np.full(count, shape), np.full(count, colour))
    images = paint(scenes, np.random.default_rng([shape, colour]), 64)
    tones = np.array(list(COLOURS.values()))
    tones /= np.linalg.norm(tones, axis=1, keepdims=True)
    covered = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5, "cross": 1 - 0.7**2}
    for image in images:
        inside = median_filter(image.max(0), 3) > 0.38  # without single bright pixels
        rows, columns = np.nonzero(inside)
        tone = image[:, inside].mean(1)
        assert (tones @ tone).argmax() == colour
        filled = inside.sum() / (np.ptp(rows) + 1) / (np.ptp(columns) + 1)
        assert abs(filled - covered[SHAPES[shape]]) < 0.1
        if SHAPES[shape] == "triangle":
            assert inside[rows.min()].sum() < inside[rows.max()].sum()
        if SHAPES[shape] == "cross":
            assert inside[(rows.min() + rows.max()) // 2, (columns.min() + columns.max()) // 2]
            assert not inside[rows.min(), columns.min()]


def test_a_whole_shape_is_on_the_image() -> None:
    images, _ = draw_shapes(300, 3)
    edge = np.ones((32, 32), bool)
    edge[1:-1, 1:-1] = False
    background = images[:, :, edge]
    assert (background > 0.5).any((1, 2)).mean() < 0.2  # at most a shape touches the outermost pixels


def test_images_too_small_for_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="on 8 pixels"):
        draw_shapes(1, 0, size=8)

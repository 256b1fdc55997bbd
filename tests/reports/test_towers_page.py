"""The page of towers: every feature named where it is drawn, loads and sentences of the plan."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cordillera.reports.ranking.towers import summary, tower_rows, towers_page
from tests.planning.ranking.test_towers import plan_of, planted


@pytest.mark.parametrize("groups", [2, 4])
def test_features_are_named_where_they_are_drawn(groups: int) -> None:
    embeddings, _, loads = planted(groups, groups)
    plan = plan_of(embeddings, loads, groups)
    page = towers_page(plan)
    dots = {
        title: (float(x), float(y), style)
        for style, x, y, title in re.findall(
            r'<circle class="dot (s\d)" cx="([\d.]+)" cy="([\d.]+)" r="3"><title>([^<]+)</title>', page
        )
    }
    names = {
        text: (float(x), float(y))
        for x, y, text in re.findall(r'<text class="tick" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+ · \d)<', page)
    }
    assert (
        dots.keys() == names.keys() == {f"{name} · {at}" for name, at in zip(plan.features, plan.towers, strict=True)}
    )
    for title, (x, y, style) in dots.items():
        assert abs(names[title][0] - x) == pytest.approx(6, abs=0.2)
        assert names[title][1] - y == pytest.approx(-4, abs=0.2)
        assert style == f"s{int(title[-1]) % 4}"
    # the map keeps the order of the first two coordinates, the second upwards
    titles = [f"{name} · {at}" for name, at in zip(plan.features, plan.towers, strict=True)]
    drawn = np.array([dots[title][:2] for title in titles])
    assert np.corrcoef(drawn[:, 0], plan.coordinates[:, 0])[0, 1] > 0.999
    assert np.corrcoef(drawn[:, 1], plan.coordinates[:, 1])[0, 1] < -0.999


def test_rows_and_sentences_are_those_of_the_plan() -> None:
    embeddings, _, loads = planted(1)
    plan = plan_of(embeddings, loads, 4)
    rows = tower_rows(plan)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert sorted(name for row in rows for name in row[-1].split(", ")) == sorted(plan.features)
    for place, load in enumerate(plan.loads, 1):
        values = plan.tower_loads(load)
        assert [float(row[place].replace(",", "")) for row in rows] == pytest.approx(values, rel=1e-5)
        assert f"{load} {max(values) / np.mean(values):.2f}" in summary(plan)[1]
    inside, across = plan.mean_similarity()
    assert summary(plan)[0].endswith(f"{inside:.3f} within a tower, {across:.3f} between towers")

"""A made log of requests: probabilities follow from the rows, and rows of a request share their history."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from pydantic import ValidationError

from cordillera import recipe as recipes
from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.loader import Loader
from cordillera.data.ranking.logs.histories import HistoriesConfig, HistoriesLog
from cordillera.models.ranking.sequence import share_histories
from cordillera.recipe import RankingRecipe

SMALL = HistoriesConfig(requests=600, candidates=3, items=50, kinds=7, median=30, longest=200, seed=4)


def frame_of(config: HistoriesConfig) -> pl.DataFrame:
    return pl.concat(frame for frame, _ in HistoriesLog(config).chunks())


@pytest.fixture(scope="module")
def made() -> pl.DataFrame:
    return frame_of(SMALL)


def test_probabilities_are_those_of_the_rows(made: pl.DataFrame) -> None:
    for item, history, probability in made.select("item_id", "history", "probability").head(300).iter_rows():
        kinds, wanted = np.array(history) % SMALL.kinds, item % SMALL.kinds
        logit = SMALL.bias + SMALL.latest * (kinds[-1] == wanted) + SMALL.taste * (kinds == wanted).mean()
        assert probability == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-12)


def test_labels_follow_the_probabilities(made: pl.DataFrame) -> None:
    probability, click = made["probability"].to_numpy(), made["click"].to_numpy()
    error = np.sqrt((probability * (1 - probability)).sum())
    assert abs(click.sum() - probability.sum()) < 4.5 * error
    assert abs((click * probability).sum() - (probability**2).sum()) < 4.5 * error


def test_lengths_are_lognormal_and_cut() -> None:
    lengths = frame_of(SMALL.model_copy(update={"requests": 5000, "candidates": 1}))["history"].list.len().to_numpy()
    assert (lengths.min(), lengths.max()) == (1, 200)
    logs = np.log(lengths[(lengths > 8) & (lengths < 200)])
    assert np.median(lengths) == pytest.approx(30, rel=0.08)
    assert (lengths == 200).mean() == pytest.approx(0.057, abs=0.012)  # beyond ln(200 / 30) / 1.2 deviations
    assert np.percentile(logs, 25) < np.log(30) < np.percentile(logs, 75)


def test_entries_stay_at_a_kind(made: pl.DataFrame) -> None:
    same = [
        float((kinds[1:] == kinds[:-1]).mean())
        for kinds in (np.array(history) % SMALL.kinds for history in made["history"][::3])
        if len(kinds) > 20
    ]
    assert 0.8 < np.mean(same) < 0.95  # 0.8 stay, and some come back to where they were


def test_the_first_requests_are_those_of_a_longer_log(made: pl.DataFrame) -> None:
    assert frame_of(SMALL.model_copy(update={"requests": 300})).equals(made.head(900))
    assert not frame_of(SMALL.model_copy(update={"requests": 9, "seed": 5})).equals(made.head(27))


def test_times_alone_are_those_of_the_rows(made: pl.DataFrame) -> None:
    parts = list(HistoriesLog(SMALL).chunks(["timestamp"]))
    assert pl.concat(frame for frame, _ in parts).equals(made.select("timestamp"))
    assert [place.first_row for _, place in parts] == [1, 769, 1537]


def test_a_batch_holds_each_history_once(tmp_path: object) -> None:
    data = DataConfig(dataset="histories", histories=SMALL, batch_size=30, shuffle="none", cache_dir=str(tmp_path))
    split = prepare(data, progress=False)
    assert sum(map(len, (split.train, split.validation, split.test))) == 1800
    batch = next(iter(Loader(split.train, 30).epoch()))
    shared = share_histories(batch.sparse["history"])
    assert len(shared.offsets) - 1 <= 10  # two short ones may be equal
    assert torch.equal(shared.of_sample, shared.of_sample.sort().values)


def test_more_kinds_than_items_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"kinds \(9\) must be at most items \(8\)"):
        HistoriesConfig(items=8, kinds=9)


def test_the_recipe_reads_histories_of_8192_entries() -> None:
    recipe = recipes.load("histories-hstu")
    assert isinstance(recipe, RankingRecipe)
    assert (recipe.data.dataset, recipe.data.shuffle) == ("histories", "none")
    assert recipe.data.histories.longest == 8192

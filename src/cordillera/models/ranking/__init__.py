"""Ranking models: their registry, and the configuration in a recipe's ``[model]`` section."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cordillera.data.ranking.features import FeatureSpec
from cordillera.embeddings.tables import TablesConfig
from cordillera.models.ranking.base import DeepConfig, RankingModel
from cordillera.models.ranking.dcn import DCN, DCNConfig
from cordillera.models.ranking.dhen import DHEN, DHENConfig
from cordillera.models.ranking.dlrm import DLRM, DLRMConfig
from cordillera.models.ranking.dnn import DNN, DNNConfig
from cordillera.models.ranking.fm import FM, FMConfig
from cordillera.models.ranking.graphs.config import GraphConfig
from cordillera.models.ranking.graphs.graph import Graph
from cordillera.models.ranking.graphs.supernet import Supernet, SupernetConfig
from cordillera.models.ranking.lr import LR, LRConfig
from cordillera.models.ranking.mods import apply_mods, weights_sum
from cordillera.models.ranking.multitask.mmoe import MMoE, MMoEConfig
from cordillera.models.ranking.multitask.ple import PLE, PLEConfig
from cordillera.models.ranking.rankmixer import RankMixer, RankMixerConfig
from cordillera.models.ranking.sequence import HSTUConfig, HSTUModel, TargetAttentionConfig, TargetAttentionModel
from cordillera.models.ranking.wukong import Wukong, WukongConfig

MODELS: dict[str, type[Any]] = {
    "lr": LR,
    "fm": FM,
    "dnn": DNN,
    "dlrm": DLRM,
    "dcn": DCN,
    "dhen": DHEN,
    "wukong": Wukong,
    "rankmixer": RankMixer,
    "mmoe": MMoE,
    "ple": PLE,
    "graph": Graph,
    "supernet": Supernet,
    "target-attention": TargetAttentionModel,
    "hstu": HSTUModel,
}

ModelConfig = Annotated[
    LRConfig
    | FMConfig
    | DNNConfig
    | DLRMConfig
    | DCNConfig
    | DHENConfig
    | WukongConfig
    | RankMixerConfig
    | MMoEConfig
    | PLEConfig
    | GraphConfig
    | SupernetConfig
    | TargetAttentionConfig
    | HSTUConfig,
    Field(discriminator="name"),
]

__all__ = ["MODELS", "ModelConfig", "RankingModel", "build"]


def build(config: ModelConfig, features: FeatureSpec, tables: TablesConfig) -> RankingModel:
    """Create the model that ``config.name`` chooses, with its mods, initialised from torch's global random state.

    Weights do not depend on the mods: the parameters that models with and without them share start with the same
    values. ``features`` are the inputs, ``tables`` settings of the embedding tables.

    Raises:
        DataError: If ``features`` holds no feature or no task.
        NumericsError: If a mod of the configuration finds nothing to change.
    """
    model: RankingModel = MODELS[config.name](config, features, tables)
    model.built = weights_sum(model)
    if isinstance(config, DeepConfig) and config.mods:
        apply_mods(model, config.mods, config.norm_block)
    return model

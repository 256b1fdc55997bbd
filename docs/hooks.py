"""Writes tables into the pages at build time, out of the code that they describe.

A page holds ``<!-- keys: data -->`` (the keys of a recipe's section, of ``model.NAME``, or of
``language.SECTION`` of a language model's), ``<!-- recipes -->`` (the
shipped recipes) or ``<!-- contributing -->`` (the repository's CONTRIBUTING.md), alone on a line. The markers of
figures, between which ``make figures`` writes, are left out of the built pages. Roles of docstrings (``:func:``) are
left out as well, and the names that they mark stay.
"""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cordillera.data.language.chats.rows import ChatDataConfig
from cordillera.data.language.cleaning import CleaningConfig
from cordillera.data.language.corpora import TextSourceConfig
from cordillera.data.ranking.features import CategoricalFeature, DenseFeature, ListFeature, Schema, TeacherColumns
from cordillera.data.ranking.logs.histories import HistoriesConfig
from cordillera.data.ranking.logs.synthetic import SyntheticConfig
from cordillera.data.ranking.stream.config import EventStreamConfig, JoinConfig
from cordillera.embeddings.dynamic_ids import DynamicRowsConfig
from cordillera.mistakes import field_descriptions
from cordillera.models.language.adapters import AdapterConfig
from cordillera.models.language.draft_model import DraftConfig
from cordillera.models.language.moe import ExpertsConfig, ExpertTraining
from cordillera.models.ranking import MODELS
from cordillera.models.ranking.graphs.blocks import BlocksConfig
from cordillera.models.ranking.graphs.config import NodeConfig
from cordillera.models.ranking.towers import TowersConfig
from cordillera.numerics.emulation.emulation import EmulationConfig
from cordillera.numerics.formats.precision import precision_of_machine
from cordillera.recipe import LanguageRecipe, RankingRecipe
from cordillera.topology import Device, Level, shipped
from cordillera.training.language.objectives import DraftingConfig, GroupsConfig, PreferencesConfig
from cordillera.training.ranking.tasks.loss_balance import BalanceConfig
from cordillera.training.ranking.teachers.augmentation import AugmentationConfig
from cordillera.training.ranking.teachers.distillation import TeacherConfig
from cordillera.training.ranking.teachers.past import PastConfig
from cordillera.training.ranking.teachers.versions import LearningTeacherConfig

ROOT = Path(__file__).parent.parent
FEATURES = {
    "schema": Schema,
    "schema.dense": DenseFeature,
    "schema.categorical": CategoricalFeature,
    "schema.lists": ListFeature,
    "schema.teacher": TeacherColumns,
    "streams": AugmentationConfig,
    "streams.join": JoinConfig,
    "streams.stream": EventStreamConfig,
    "streams.teacher": LearningTeacherConfig,
    "streams.past": PastConfig,
}


LANGUAGE = {name: field.annotation for name, field in LanguageRecipe.model_fields.items()} | {
    "data.sources": TextSourceConfig,
    "data.cleaning": CleaningConfig,
    "model.experts": ExpertsConfig,
    "model.adapter": AdapterConfig,
    "model.draft": DraftConfig,
    "chats": ChatDataConfig,
    "objective.dpo": PreferencesConfig,
    "objective.grpo": GroupsConfig,
    "objective.draft": DraftingConfig,
    "training.experts": ExpertTraining,
}


def _section(name: str) -> type[BaseModel]:
    if name.startswith("language."):
        config = LANGUAGE[name.removeprefix("language.")]
        assert isinstance(config, type)
        return config
    if name == "top":
        return RankingRecipe
    if name in FEATURES:
        return FEATURES[name]
    if name == "data.synthetic":
        return SyntheticConfig
    if name == "data.histories":
        return HistoriesConfig
    if name == "training.emulate":
        return EmulationConfig
    if name == "training.balance":
        return BalanceConfig
    if name == "training.teacher":
        return TeacherConfig
    if name == "tables.dynamic":
        return DynamicRowsConfig
    if name == "model.towers":
        return TowersConfig
    if name == "model.nodes":
        return NodeConfig
    if name == "space.blocks":
        return BlocksConfig
    if name == "cluster.device":
        return Device
    if name == "cluster.levels":
        return Level
    if name.startswith("model."):
        return MODELS[name.removeprefix("model.")].Config
    annotation = RankingRecipe.model_fields[name].annotation
    assert isinstance(annotation, type)
    return annotation


def _type(annotation: Any) -> str:
    """An annotation as people write values: `"a"` or `"b"`, integer, list of integers."""
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "unset"}
    if annotation in names:
        return names[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f'`"{value}"`' for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (list, tuple):
        inner = list(dict.fromkeys(_type(argument) for argument in arguments if argument is not Ellipsis))
        return f"list of {' and '.join(inner)}"
    if origin is dict:
        return f"table of {_type(arguments[1])} by {_type(arguments[0])}"
    return getattr(annotation, "__name__", str(annotation)).removesuffix("Config").lower()


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple | list):
        return f"`{list(value)}`"
    return f"`{value}`"


def _keys(name: str) -> str:
    config = _section(name)
    texts = field_descriptions(config)
    rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for field_name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        if name == "top" and field_name == "model":
            continue
        default = "needed" if field.is_required() else _value(field.get_default(call_default_factory=True))
        if field.default_factory is precision_of_machine:
            default = "by the machine"
        text = _cell(re.sub(r"``", "`", texts.get(field_name, "")))
        rows.append(f"| `{field.alias or field_name}` | {_type(field.annotation)} | {default} | {text} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    """Escape the bars of a text for a table, except those in code, where a backslash would be shown."""
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in re.split(r"(`[^`]*`)", text))


def _recipes() -> str:
    rows = ["| recipe | what it trains |", "| --- | --- |"]
    return "\n".join(
        rows + [f"| `{name}` | {description} |" for name, description in shipped("cordillera.recipes").items()]
    )


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the marked places of a page; called by MkDocs.

    Args:
        markdown: The page's text.

    Returns:
        The text with its tables.
    """
    markdown = re.sub(r"^<!-- keys: ([\w.-]+) -->$", lambda match: _keys(match[1]), markdown, flags=re.MULTILINE)
    markdown = markdown.replace("<!-- recipes -->", _recipes())
    if "<!-- contributing -->" in markdown:
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        text = re.sub(r"\[([^]]+)\]\((?!docs/|#|\w+:)[^)]+\)", r"\1", text)  # files that are no pages
        markdown = markdown.replace("<!-- contributing -->", re.sub(r"\]\(docs/", "](", text))
    return re.sub(r"<!-- /?figures?(: [\w.-]+)? -->", "", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the roles of docstrings; called by MkDocs.

    Args:
        html: The page's content.

    Returns:
        The content, in which a name stands alone; one that began with ``~`` is its last part.
    """
    html = re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", html)
    return re.sub(r"<code>~(?:\w+\.)*(\w+)</code>", r"<code>\1</code>", html)

"""Cordillera trains, serves and plans large recommendation and language models.

The command line in a few lines of Python::

    import cordillera

    recipe = cordillera.load_recipe("movielens-wukong", {"training.epochs": 2})
    outcome = cordillera.train(recipe, "runs/mine")
    print(outcome.evaluation.metrics())
    cordillera.predict(outcome.run, "samples.csv", "scores.csv")

A trained model in memory::

    model = cordillera.load_model("runs/mine")
    frame["score"] = model.predict(frame)

With a language model::

    model = cordillera.load_language_model("smollm2")
    print(model.generate("What is a cordillera?")[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cordillera.errors import (
    CheckpointError,
    CordilleraError,
    DataError,
    DependencyError,
    NumericsError,
    PlanError,
    RecipeError,
    RunError,
    TrainingError,
)
from cordillera.kernels.repeatable import repeat_products
from cordillera.kernels.threads import limit_spinning

if TYPE_CHECKING:
    from cordillera.data.ranking.features import RankingBatch
    from cordillera.data.tokenizers.chat import Message
    from cordillera.jagged import JaggedBatch, JaggedTensor
    from cordillera.recipe import LanguageRecipe, PostTrainingRecipe, RankingRecipe, write_recipe
    from cordillera.recipe import load as load_recipe
    from cordillera.run import Run
    from cordillera.serving.language.language_model import load_language_model
    from cordillera.serving.language.sampler import Sampling
    from cordillera.workflows import (
        ServerConfig,
        average,
        batches,
        best_of,
        compare,
        convert,
        evaluate,
        export,
        importance,
        isoflop,
        judge,
        load_model,
        plan,
        predict,
        quantize,
        report,
        search,
        serve,
        sweep,
        train,
    )

__all__ = [
    "CheckpointError",
    "CordilleraError",
    "DataError",
    "DependencyError",
    "JaggedBatch",
    "JaggedTensor",
    "LanguageRecipe",
    "Message",
    "NumericsError",
    "PlanError",
    "PostTrainingRecipe",
    "RankingBatch",
    "RankingRecipe",
    "RecipeError",
    "Run",
    "RunError",
    "Sampling",
    "ServerConfig",
    "TrainingError",
    "average",
    "batches",
    "best_of",
    "compare",
    "convert",
    "evaluate",
    "export",
    "importance",
    "isoflop",
    "judge",
    "load_language_model",
    "load_model",
    "load_recipe",
    "plan",
    "predict",
    "quantize",
    "report",
    "search",
    "serve",
    "sweep",
    "train",
    "write_recipe",
]

limit_spinning()  # before torch is imported
repeat_products()  # before torch multiplies

_WHERE = {
    "JaggedBatch": ("cordillera.jagged", "JaggedBatch"),
    "JaggedTensor": ("cordillera.jagged", "JaggedTensor"),
    "LanguageRecipe": ("cordillera.recipe", "LanguageRecipe"),
    "Message": ("cordillera.data.tokenizers.chat", "Message"),
    "RankingBatch": ("cordillera.data.ranking.features", "RankingBatch"),
    "PostTrainingRecipe": ("cordillera.recipe", "PostTrainingRecipe"),
    "RankingRecipe": ("cordillera.recipe", "RankingRecipe"),
    "load_recipe": ("cordillera.recipe", "load"),
    "Run": ("cordillera.run", "Run"),
    "Sampling": ("cordillera.serving.language.sampler", "Sampling"),
    "write_recipe": ("cordillera.recipe", "write_recipe"),
    "load_language_model": ("cordillera.serving.language.language_model", "load_language_model"),
    **{
        name: ("cordillera.workflows", name)
        for name in (
            *("ServerConfig", "average", "batches", "best_of", "compare", "convert", "evaluate", "export"),
            *("importance", "isoflop", "judge", "load_model", "plan", "predict", "quantize", "report", "search"),
            *("serve", "sweep", "train"),
        )
    },
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    # Torch takes seconds to import; `cordillera --help` should not wait for it.
    from importlib import import_module, metadata

    if name == "__version__":
        return metadata.version("cordillera")
    if name not in _WHERE:
        raise AttributeError(f"module 'cordillera' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(import_module(module), attribute)

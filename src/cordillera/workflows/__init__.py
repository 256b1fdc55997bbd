"""Operations on recipes and runs as functions: train, evaluate, predict, compare, search, serve, plan.

The command line calls these and adds nothing but drawing. Modules are imported when they are used, because planning
does without torch, which takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cordillera.workflows.architectures.search import SearchConfig, SearchOutcome, search
    from cordillera.workflows.checkpoints.conversion import Conversion, convert
    from cordillera.workflows.evaluation.importance import importance
    from cordillera.workflows.language import LanguageOutcome
    from cordillera.workflows.planning import plan
    from cordillera.workflows.post_training.answers import best_of, judge
    from cordillera.workflows.post_training.averaging import average
    from cordillera.workflows.prediction import export, load_model, predict
    from cordillera.workflows.quantization import quantize
    from cordillera.workflows.ranking import Outcome
    from cordillera.workflows.runs import apply_delta, compare, evaluate, make_delta, report, train
    from cordillera.workflows.scaling import Sweep, isoflop, sweep
    from cordillera.workflows.serving.server import ServerConfig, serve
    from cordillera.workflows.streams.augmentation import AugmentationOutcome, augment
    from cordillera.workflows.trained import batches, model_of

__all__ = [
    "AugmentationOutcome",
    "Conversion",
    "LanguageOutcome",
    "Outcome",
    "SearchConfig",
    "SearchOutcome",
    "ServerConfig",
    "Sweep",
    "apply_delta",
    "augment",
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
    "load_model",
    "make_delta",
    "model_of",
    "plan",
    "predict",
    "quantize",
    "report",
    "search",
    "serve",
    "sweep",
    "train",
]

_WHERE = {
    "architectures.search": ("SearchConfig", "SearchOutcome", "search"),
    "checkpoints.conversion": ("Conversion", "convert"),
    "evaluation.importance": ("importance",),
    "language": ("LanguageOutcome",),
    "planning": ("plan",),
    "post_training.answers": ("best_of", "judge"),
    "post_training.averaging": ("average",),
    "prediction": ("export", "load_model", "predict"),
    "quantization": ("quantize",),
    "ranking": ("Outcome",),
    "runs": ("apply_delta", "compare", "evaluate", "make_delta", "report", "train"),
    "scaling": ("Sweep", "isoflop", "sweep"),
    "serving.server": ("ServerConfig", "serve"),
    "streams.augmentation": ("AugmentationOutcome", "augment"),
    "trained": ("batches", "model_of"),
}


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"cordillera.workflows.{module}"), name)
    raise AttributeError(f"module 'cordillera.workflows' has no attribute {name!r}")

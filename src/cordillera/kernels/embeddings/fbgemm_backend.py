"""Lookup and update by FBGEMM's table-batched CPU kernels, called directly, without its modules or its autograd.

The kernels take the sizes of tables as tensors; here the whole flat weight is one table for updates, so that features
may share tables in any order. FBGEMM sorts a batch's ids with a parallel radix sort that is stable, sums duplicates in
ascending position, in float32, and lets one thread update a row.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cordillera.kernels.embeddings.lookup import Lookup, linearise

if TYPE_CHECKING:
    from cordillera.kernels.embeddings.update import Update

_TORCH_OF = {"1.6": "2.11", "1.7": "2.12", "1.8": "2.13"}  # torch version of each release of FBGEMM
_RULES = {"sgd": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "rowwise_adagrad"}


def unavailable() -> str | None:
    """Return why FBGEMM cannot be used here, or None if it can."""
    installed = None
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            installed = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    if installed is None:
        return "FBGEMM is not installed (pip install 'cordillera[cpu]')"
    built_for = _TORCH_OF.get(".".join(installed.split(".")[:2]))
    running = ".".join(torch.__version__.split(".")[:2])
    mismatch = f"fbgemm {installed} is built for torch {built_for}, this is torch {torch.__version__}"
    if built_for is not None and built_for != running:
        return mismatch
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import fbgemm_gpu  # noqa: F401
        operators = [
            getattr(torch.ops.fbgemm, f"split_embedding_backward_codegen_{rule}_cpu") for rule in _RULES.values()
        ]
        operators.append(torch.ops.fbgemm.split_embedding_codegen_forward_cpu)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"fbgemm {installed} does not load with torch {torch.__version__}: {reason}"
    return None


def unsupported(optimizer: str, dtype: torch.dtype, device: str) -> str | None:
    """Return why a table cannot be updated by this back end, or None if it can."""
    if device != "cpu":
        return f"the fbgemm back end runs on CPUs, the tables are on {device!r}"
    if dtype != torch.float32:
        return f"the fbgemm back end updates float32 tables, these are {dtype}"
    if optimizer not in _RULES:
        return f"FBGEMM has no exact {optimizer} on CPUs, only {', '.join(_RULES)}"
    return None


def lookup(
    weight: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    value_weights: Tensor | None,
    first_row: Tensor,
    num_rows: Tensor,
    dtype: torch.dtype,
) -> Lookup:
    """Look up and sum bags (:func:`cordillera.kernels.embeddings.lookup.embedding_bag`)."""
    features, dim = first_row.numel(), weight.shape[1]
    bags = values.numel() if offsets is None else offsets.numel() - 1
    rows, misplaced = linearise(values, offsets, first_row, num_rows)
    if misplaced >= 0:
        return Lookup(weight.new_empty((0, features, dim)), rows, misplaced)
    if offsets is None:
        offsets = torch.arange(bags + 1)
    output = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
        weight.detach().view(-1),
        torch.zeros(features, dtype=torch.int64),  # rows count from the start of the flat weight
        torch.arange(features + 1, dtype=torch.int32) * dim,
        features * dim,
        torch.tensor([0] * features + [weight.shape[0]]),  # all features share one table
        rows,
        offsets.to(torch.int64),
        0,  # sum
        None if value_weights is None else value_weights.detach().to(torch.float32),
        0,  # float32
    )
    return Lookup(output.view(bags // features, features, dim).to(dtype), rows, misplaced)


def update(call: Update) -> None:
    """Run one update, already checked (:func:`cordillera.kernels.embeddings.update.sparse_update`)."""
    weight, rows, grad, value_weights = call.weight, call.rows, call.grad, call.value_weights
    batch, features, dim = grad.shape
    offsets = torch.arange(rows.numel() + 1) if call.offsets is None else call.offsets
    one_table = [
        weight.view(-1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64),
        torch.tensor([0, dim], dtype=torch.int32),
        dim,
        torch.tensor([0, weight.shape[0]], dtype=torch.int64),
        max(1, weight.shape[0].bit_length()),
    ]
    moments = [
        argument
        for tensor in call.state.values()
        for argument in (tensor.view(-1), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    ]
    operator = getattr(torch.ops.fbgemm, f"split_embedding_backward_codegen_{_RULES[call.optimizer.name]}_cpu")
    operator(
        grad.transpose(0, 1).to(torch.float32).reshape(batch * features, dim),
        *one_table,
        rows,
        offsets.to(torch.int64),
        0,  # sum
        None if value_weights is None else value_weights.detach().to(torch.float32),
        False,  # no stochastic rounding
        *moments,
        torch.tensor(call.learning_rate, dtype=torch.float32),
        *([call.optimizer.eps] if moments else []),
    )

"""Every interaction module equals its definition, written out as loops or einsum in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cordillera.errors import DataError
from cordillera.models.ranking.interactions import (
    MLP,
    BasicFM,
    BiInteraction,
    Convolution,
    CrossNetwork,
    DotInteraction,
    EmbeddingAttention,
    EmbeddingCross,
    FactorizationMachineBlock,
    LinearCompression,
    OptimisedFM,
    RowsMLP,
)

SHAPES = [(5, 6, 4), (1, 2, 3), (3, 1, 4), (4, 7, 1)]


def embeddings(shape: tuple[int, int, int], requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("include_diagonal", [False, True])
def test_dot_is_the_lower_triangle_row_by_row(shape: tuple[int, int, int], include_diagonal: bool) -> None:
    x = embeddings(shape)
    expected = [
        [
            sum(sample[i, k] * sample[j, k] for k in range(shape[2]))
            for i in range(shape[1])
            for j in range(i + include_diagonal)
        ]
        for sample in x
    ]
    module = DotInteraction(shape[1], include_diagonal)
    assert module(x).shape == (shape[0], module.outputs)
    torch.testing.assert_close(module(x), torch.tensor(expected, dtype=torch.float64).view(shape[0], module.outputs))


@pytest.mark.parametrize("include_diagonal", [False, True])
def test_dot_has_exact_first_and_second_derivatives(include_diagonal: bool) -> None:
    module = DotInteraction(4, include_diagonal)
    x = embeddings((2, 4, 3), requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(module, (x,))


def test_dot_backward_equals_that_of_indexing() -> None:
    x = embeddings((6, 9, 5), requires_grad=True)
    module = DotInteraction(9)
    cotangent = torch.randn(6, module.outputs, dtype=torch.float64)
    (ours,) = torch.autograd.grad(module(x), x, cotangent)
    i, j = torch.tril_indices(9, 9, -1)
    (plain,) = torch.autograd.grad((x @ x.mT)[:, i, j], x, cotangent)
    torch.testing.assert_close(ours, plain)


def test_permuting_the_features_permutes_the_products() -> None:
    x, order = embeddings((3, 5, 4)), torch.tensor([3, 0, 4, 1, 2])
    pairs = [(i, j) for i in range(5) for j in range(i)]
    column = {frozenset(pair): position for position, pair in enumerate(pairs)}
    moved = [column[frozenset((int(order[i]), int(order[j])))] for i, j in pairs]
    module = DotInteraction(5)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, moved])


@pytest.mark.parametrize("shape", SHAPES)
def test_bi_interaction_is_the_sum_over_pairs(shape: tuple[int, int, int]) -> None:
    x = embeddings(shape)
    pairs = itertools.combinations(range(shape[1]), 2)
    expected = sum((x[:, i] * x[:, j] for i, j in pairs), torch.zeros(shape[0], shape[2], dtype=torch.float64))
    torch.testing.assert_close(BiInteraction()(x), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_basic_fm_is_every_product(shape: tuple[int, int, int]) -> None:
    x = embeddings(shape)
    torch.testing.assert_close(BasicFM(shape[1])(x), torch.einsum("bid,bjd->bij", x, x).flatten(1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 3, 9])
def test_optimised_fm_is_all_products_times_y_whatever_the_order(shape: tuple[int, int, int], rank: int) -> None:
    x = embeddings(shape)
    module = OptimisedFM(shape[1], rank).double()
    expected = (x @ x.mT) @ module.y  # from left to right, where the module goes from right to left
    torch.testing.assert_close(module(x), expected.flatten(1))


def test_attentive_fm_makes_a_y_for_each_sample() -> None:
    x = embeddings((4, 5, 3))
    module = OptimisedFM(5, 2, (8,), 3).double()
    assert module.attention is not None
    y = module.attention(x)
    assert y.shape == (4, 5, 2)
    assert not torch.allclose(y[0], y[1])
    torch.testing.assert_close(module(x), torch.einsum("bid,bjd,bjk->bik", x, x, y).flatten(1))


def test_attentive_fm_needs_to_know_the_width() -> None:
    with pytest.raises(ValueError, match="embedding_dim"):
        OptimisedFM(5, 2, (8,))


def test_factorization_machine_block_normalises_the_flat_products_then_mixes_them() -> None:
    x = embeddings((4, 5, 3))
    block = FactorizationMachineBlock(5, 2, 3, rank=4, hidden=(6,)).double()
    flat = torch.einsum("bid,bjd,jk->bik", x, x, block.fm.y).reshape(4, 20)
    centred = flat - flat.mean(1, keepdim=True)
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    first, second = (layer for layer in block.mlp.mlp.layers if isinstance(layer, nn.Linear))
    hidden = (normed @ first.weight.T + first.bias).clamp(min=0)
    torch.testing.assert_close(block(x), (hidden @ second.weight.T + second.bias).reshape(4, 2, 3))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_compression_combines_embeddings(bias: bool) -> None:
    x = embeddings((4, 5, 3))
    module = LinearCompression(5, 2, bias).double()
    expected = torch.einsum("mn,bnd->bmd", module.weight, x)
    if module.bias is not None:
        nn.init.normal_(module.bias)
        expected = expected + module.bias[:, None]
    torch.testing.assert_close(module(x), expected)


def test_linear_compression_is_linear() -> None:
    x, y = embeddings((4, 5, 3)), embeddings((4, 5, 3))
    module = LinearCompression(5, 2).double()
    torch.testing.assert_close(module(2 * x - 3 * y), 2 * module(x) - 3 * module(y))


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_is_a_transformer_encoder_layer(heads: int) -> None:
    x = embeddings((4, 5, 6))
    ours = EmbeddingAttention(6, heads, feed_forward=7).double()
    theirs = nn.TransformerEncoderLayer(6, heads, 7, dropout=0.0, batch_first=True, dtype=torch.float64)
    nn.init.normal_(ours.query_key_value.bias)
    nn.init.normal_(ours.output.bias)
    first, second = (layer for layer in ours.feed_forward.layers if isinstance(layer, nn.Linear))
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(ours.query_key_value.weight)
        theirs.self_attn.in_proj_bias.copy_(ours.query_key_value.bias)
    theirs.self_attn.out_proj.load_state_dict(ours.output.state_dict())
    theirs.linear1.load_state_dict(first.state_dict())
    theirs.linear2.load_state_dict(second.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


def test_attention_needs_heads_that_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"heads \(4\) must divide embedding_dim \(6\)"):
        EmbeddingAttention(6, 4)


def test_cross_network_multiplies_by_the_input_and_keeps_its_own() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    module = CrossNetwork(4, 2).double()
    expected = []
    for x0 in x:
        xl = x0
        for cross in module.crosses:
            row = [
                x0[i] * (sum(cross.weight[i, j] * xl[j] for j in range(4)) + cross.bias[i]) + xl[i] for i in range(4)
            ]
            xl = torch.stack(row)
        expected.append(xl)
    torch.testing.assert_close(module(x), torch.stack(expected))


def test_low_rank_cross_is_a_cross_with_a_factored_weight() -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    low, full = CrossNetwork(6, 2, low_rank=2).double(), CrossNetwork(6, 2).double()
    for narrow, wide in zip(low.crosses, full.crosses, strict=True):
        wide.load_state_dict({"weight": narrow[1].weight @ narrow[0].weight, "bias": narrow[1].bias})
    torch.testing.assert_close(low(x), full(x))


def test_embedding_cross_is_the_gram_matrix_of_the_columns_times_a_weight() -> None:
    x = embeddings((4, 5, 3))
    module = EmbeddingCross(2, 3).double()
    nn.init.normal_(module.bias)
    for sample, result in zip(x, module(x), strict=True):
        columns = sample.T  # [d, n], as the paper writes X
        expected = columns @ columns.T @ module.weight.T + module.bias.T  # [d, m]
        torch.testing.assert_close(result, expected.T)


def test_convolution_slides_over_the_plane_of_embeddings() -> None:
    x = embeddings((2, 4, 5))
    module = Convolution(channels=2, kernel_size=3).double()
    weight, bias = module.convolution.weight, module.convolution.bias
    padded = F.pad(x, (1, 1, 1, 1))
    expected = torch.zeros(2, 2, 4, 5, dtype=torch.float64)
    for channel, i, j in itertools.product(range(2), range(4), range(5)):
        window = padded[:, i : i + 3, j : j + 3]
        expected[:, channel, i, j] = (window * weight[channel, 0]).sum((1, 2)) + bias[channel]
    torch.testing.assert_close(module(x), expected.reshape(2, 8, 5))


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_mlp_is_linear_norm_activation_a_layer(norm: str) -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    mlp = MLP(3, (5, 4), 2, activation="silu", norm=norm, output_activation="tanh").double()
    expected = x
    linears = [layer for layer in mlp.layers if isinstance(layer, nn.Linear)]
    for linear in linears[:-1]:
        expected = expected @ linear.weight.T + linear.bias
        if norm != "none":
            dim = 1 if norm == "layer" else 0
            mean, variance = expected.mean(dim, keepdim=True), expected.var(dim, correction=0, keepdim=True)
            expected = (expected - mean) / (variance + 1e-5).sqrt()
        expected = expected * expected.sigmoid()
    expected = (expected @ linears[-1].weight.T + linears[-1].bias).tanh()
    torch.testing.assert_close(mlp(x), expected)


def test_mlp_without_output_layer_ends_in_its_activation() -> None:
    mlp = MLP(3, (5, 4))
    assert mlp.outputs == 4
    assert bool((mlp(torch.randn(50, 3)) >= 0).all())


def test_dropout_acts_in_training_only() -> None:
    mlp, x = MLP(4, (64,), dropout=0.5), torch.randn(2, 4)
    assert not torch.equal(mlp(x), mlp(x))
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))


def test_rows_mlp_reads_its_output_as_embeddings() -> None:
    module, x = RowsMLP(6, (5,), 3, 4), torch.randn(2, 6)
    torch.testing.assert_close(module(x)[:, 1, 2], module.mlp(x)[:, 4 + 2])


MODULES = {
    "dot": DotInteraction(5),
    "basic fm": BasicFM(5),
    "optimised fm": OptimisedFM(5, 3),
    "attentive fm": OptimisedFM(5, 3, (8,), 4),
    "fm block": FactorizationMachineBlock(5, 2, 4, hidden=(8,)),
    "linear": LinearCompression(5, 2),
    "attention": EmbeddingAttention(4, 2),
    "cross": EmbeddingCross(2, 4),
    "convolution": Convolution(),
}


@pytest.mark.parametrize("name", MODULES)
def test_bfloat16_autocast_stays_near_float32(name: str) -> None:
    module, x = MODULES[name], torch.randn(64, 5, 4)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        result = module(x.bfloat16())
    assert float((result - expected).square().mean().sqrt() / expected.std()) < 0.02


@pytest.mark.parametrize("name", MODULES)
def test_samples_do_not_mix(name: str) -> None:
    module, x = MODULES[name], torch.randn(6, 5, 4)
    together = module(x)
    alone = torch.cat([module(sample[None]) for sample in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("module", [DotInteraction(4), DotInteraction(4, include_diagonal=True), BasicFM(4)])
def test_another_number_of_embeddings_is_refused(module: torch.nn.Module, rows: int) -> None:
    with torch.no_grad(), pytest.raises(DataError, match=rf"expected \[B, 4, d\], got \[2, {rows}, 8\]"):
        module(torch.randn(2, rows, 8))


def test_unknown_norms_and_activations_are_refused() -> None:
    with pytest.raises(DataError, match="no norm 'rms'"):
        MLP(3, [4], norm="rms")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no activation 'swish'"):
        MLP(3, [4], activation="swish")  # type: ignore[arg-type]

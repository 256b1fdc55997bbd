"""Backward passes that compute gradients of inputs and of weights apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class ForwardState:
    """Forward of one microbatch in a stage: its input and its output (the loss in the last stage), with their graph."""

    output: Tensor

    def __init__(self, given: Tensor) -> None:
        self.input = given

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Add the gradients of the weights; return the gradient of the input if it requires one."""
        if self.output.requires_grad:
            torch.autograd.backward(self.output, gradient)
        if not self.input.requires_grad:
            return None
        return torch.zeros_like(self.input) if self.input.grad is None else self.input.grad

    def weights(self) -> None:
        """Refuse: the gradients of the weights were added by :meth:`backward`."""
        raise AssertionError("a checked schedule has W after I")


class SplitBackward(NamedTuple):
    """Remainder of a backward after the gradient of its input.

    Attributes:
        gradient: Gradient of the output; None if the output is a loss.
        from_output: Weights whose gradients are computed from the output; None for all weights.
        joints: Places where the other weights join the trunk: edges, gradients that reached them, and weights.
    """

    output: Tensor
    gradient: Tensor | None
    from_output: list[Tensor] | None = None
    joints: Sequence[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = ()

    def weights(self) -> None:
        """Add the gradients of the weights."""
        if not self.output.requires_grad:
            return
        if self.from_output is None:
            torch.autograd.backward(self.output, self.gradient)
            return
        if self.from_output:
            torch.autograd.backward(self.output, self.gradient, retain_graph=True, inputs=self.from_output)
        for edges, gradients, weights in self.joints:
            torch.autograd.backward(edges, gradients, inputs=weights)


def split_backward(forward: ForwardState, gradient: Tensor | None) -> tuple[SplitBackward, Tensor | None]:
    """Run the first half of a split backward: return the state for the second half, and the input's gradient or None.

    The trunk of the graph consists of the nodes between output and input. A weight joins it at some node (the weight of
    a linear layer at its product), and the gradient that reaches this node is all that the weight's gradient needs. So
    the first half goes down the trunk and keeps the gradients that reach those nodes, and the second half goes from
    each of them to its weights. From a weight that joins in several places, a path would lead along the trunk from one
    place to another, so the gradients of such weights are computed from the output again.
    """
    given, output = forward.input, forward.output
    if not given.requires_grad:
        return SplitBackward(output, gradient), None
    joints = None
    if output.requires_grad:
        joints = _joints(get_gradient_edge(output), get_gradient_edge(given).node)
    if joints is None:  # the output does not depend on the input
        return SplitBackward(output, gradient), torch.zeros_like(given)
    times = Counter(weight for _, weights in joints for weight in weights)
    shared = [weight for weight, count in times.items() if count > 1]
    single = [(edges, [weight for weight in weights if times[weight] == 1]) for edges, weights in joints]
    single = [(edges, weights) for edges, weights in single if weights]
    # the input is passed as an edge because the call takes either tensors or edges
    wanted = [get_gradient_edge(given), *(edge for edges, _ in single for edge in edges)]
    seed = None if gradient is None else [gradient]
    found = torch.autograd.grad([output], wanted, seed, retain_graph=True, allow_unused=True)
    reached = dict(zip(wanted, found, strict=True))
    kept = []
    for edges, weights in single:
        have = [edge for edge in edges if reached[edge] is not None]
        if have:
            kept.append((have, [reached[edge] for edge in have], weights))
    return SplitBackward(output, gradient, shared, kept), torch.zeros_like(given) if found[0] is None else found[0]


def _joints(root: GradientEdge, end: Node) -> list[tuple[list[GradientEdge], list[Tensor]]] | None:
    """Return the nodes at which weights join the trunk, from input to output: the edges into each, and its weights.

    ``root`` is the edge of the output, ``end`` the node of the input; None if no path leads from output to input.
    """
    below: list[Node] = []  # each node comes after the nodes that it leads to
    entries: dict[Node, dict[int, None]] = {root.node: {root.output_nr: None}}
    stack: list[tuple[Node, bool]] = [(root.node, False)]
    seen: set[Node] = set()
    while stack:
        node, done = stack.pop()
        if done:
            below.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        for child, number in node.next_functions:
            if child is not None:
                entries.setdefault(child, {})[number] = None
                stack.append((child, False))
    trunk: set[Node] = set()
    weights: dict[Node, dict[Tensor, None]] = {}  # weights of nodes beside the trunk; dicts keep the order
    joints: list[tuple[list[GradientEdge], list[Tensor]]] = []
    for node in below:
        children = [child for child, _ in node.next_functions if child is not None]
        beside = {leaf: None for child in children if child not in trunk for leaf in weights[child]}
        if node is end or any(child in trunk for child in children):
            trunk.add(node)
            if beside:
                joints.append(([GradientEdge(node, number) for number in entries[node]], list(beside)))
        elif hasattr(node, "variable"):
            weights[node] = {node.variable: None}
        else:
            weights[node] = beside
    return joints if root.node in trunk else None


def accumulate(tensor: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to the gradient of ``tensor``."""
    tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

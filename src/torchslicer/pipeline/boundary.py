"""How a value crosses a cut without changing a bit of any gradient.

Autograd adds the gradients of a value in reverse order of its uses. So a value that several later stages use gets
its gradient back through its consumers in reverse order, each adding its own terms on top of what it received, the
producer last. For that, every imported tensor passes through one identity node; its uses take that node's output,
and the gradient received from later stages is a further root, at that node, of the same backward call: the engine
puts the gradients of roots into a node's buffer before it runs anything.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils import _pytree as pytree


class _Import(torch.autograd.Function):
    """The identity node of an imported tensor. Its output is no view, so an in-place operation may follow."""

    @staticmethod
    def forward(ctx: Any, _phony: torch.Tensor, tensor: torch.Tensor, received: list[Any]) -> torch.Tensor:
        ctx.received = received
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        ctx.received[0] = gradients[0]
        return None, None, None


Root = tuple[GradientEdge, torch.Tensor]
"""Where a backward pass starts, and with what gradient."""

_LEAF = pytree.tree_flatten(torch.empty(0))[1]
"""The structure of a value that is one tensor, as most are."""


def run_backward(roots: Sequence[Root]) -> None:
    """Run the backward pass from *roots*.

    What `torch.autograd.backward` ends in: the engine checks the gradients itself, and what comes before takes as long
    as the forward pass of a small layer.
    """
    edges, gradients = zip(*roots, strict=True)
    _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


@functools.cache
def _phony(device: torch.device) -> torch.Tensor:
    """What makes autograd record the identity node: a parameter of no elements, which never gets a gradient."""
    return torch.empty(0, device=device, requires_grad=True)


@dataclass(frozen=True)
class Packet:
    """A value on its way: its leaves, their structure, and which leaves take a gradient."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    wants_gradient: tuple[bool, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors inside."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def copy(self) -> Packet:
        """Return a packet with tensors of its own."""
        leaves = tuple(leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves)
        return Packet(leaves, self.spec, self.wants_gradient)


Gradients = tuple["torch.Tensor | None", ...]
"""Gradients of the leaves of a packet; None where a leaf takes none or none came."""


class Import:
    """The consumer's side of one value in one micro-batch.

    Args:
        packet: The value.
        device: Where it is needed.
        awaits: Whether later stages send gradients of it too (`roots`); without that, its edges need not be kept.
    """

    def __init__(self, packet: Packet, device: torch.device, *, awaits: bool = True) -> None:
        self._received: list[list[torch.Tensor | None]] = []
        self._edges: list[GradientEdge | None] = []
        leaves = [
            self._enter(leaf, wanted, device, awaits=awaits)
            for leaf, wanted in zip(packet.leaves, packet.wants_gradient, strict=True)
        ]
        self.value = leaves[0] if packet.spec is _LEAF else pytree.tree_unflatten(leaves, packet.spec)

    def _enter(self, leaf: Any, wants_gradient: bool, device: torch.device, *, awaits: bool) -> Any:
        received: list[torch.Tensor | None] = [None]
        self._received.append(received)
        if not isinstance(leaf, torch.Tensor):
            self._edges.append(None)
            return leaf
        tensor = leaf if leaf.device == device else leaf.detach().to(device)
        inside = _Import.apply(_phony(device), tensor, received) if wants_gradient else tensor.detach()  # type: ignore[no-untyped-call]
        self._edges.append(get_gradient_edge(inside) if wants_gradient and awaits else None)
        return inside

    def forget_value(self) -> None:
        """Let go of the tensors; autograd keeps those it needs."""
        self.value = None

    def roots(self, later: Gradients) -> list[Root]:
        """Return the roots that put what later consumers sent before what this stage adds."""
        return _pair(self._edges, later)

    def gradients(self) -> Gradients:
        """Return what has arrived at the identity nodes in the backward pass."""
        return tuple(received[0] for received in self._received)


class Export:
    """The producer's side of one value in one micro-batch. Holds no tensor, only its gradient edges."""

    def __init__(self, value: Any) -> None:
        leaves, spec = ([value], _LEAF) if type(value) is torch.Tensor else pytree.tree_flatten(value)
        wanted = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        self._edges = [get_gradient_edge(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True)]
        self.packet: Packet | None = Packet(
            tuple(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves), spec, wanted
        )

    def take(self) -> Packet:
        """Return the packet and let go of it."""
        packet, self.packet = self.packet, None
        if packet is None:
            raise RuntimeError("the packet was taken already")
        return packet

    def roots(self, gradients: Gradients) -> list[Root]:
        """Return the roots of the backward pass for the gradients that the first consumer sent."""
        return _pair(self._edges, gradients)


def _pair(edges: Sequence[GradientEdge | None], gradients: Gradients) -> list[Root]:
    return [
        (edge, gradient)
        for edge, gradient in zip(edges, gradients, strict=True)
        if edge is not None and gradient is not None
    ]

"""What a model is, as data: nodes in execution order, the units they form, the values between units.

A *node* is one operation. A *unit* is the smallest piece that may be cut apart: one call of a leaf module,
or a run of functional operations tied to it. A *value* is what a node makes and another unit uses.
Nothing here runs a model (`pipeline.interpreter` does) and nothing here looks inside one (`graph.trace` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

Op = Literal["input", "module", "function", "method", "parameter", "buffer", "constant"]

SOURCES = ("parameter", "buffer", "constant")
"""Nodes that only fetch a tensor of the model. They are placed in every unit that uses them and never cross a cut."""


@dataclass(frozen=True)
class Ref:
    """A reference, inside the arguments of a node, to what node *index* made."""

    index: int


@dataclass(frozen=True)
class Ambient:
    """The contexts that a node was recorded under and must run under again.

    ``autocast`` is None (as the caller has it) or ``(device_type, enabled, dtype)``.
    """

    grad_enabled: bool = True
    autocast: tuple[str, bool, torch.dtype] | None = None


DEFAULT_AMBIENT = Ambient()


@dataclass(frozen=True)
class Node:
    """One operation.

    ``target`` is the path of a module, a function, the name of a method, the qualified name of a parameter,
    buffer or constant, or the name of an input, as ``op`` says. ``args`` and ``kwargs`` hold `Ref` leaves.
    ``scope`` is the path of the module whose ``forward`` issued the node.
    """

    index: int
    name: str
    op: Op
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = ""
    ambient: Ambient = DEFAULT_AMBIENT

    @cached_property
    def refs(self) -> tuple[int, ...]:
        """Indices of the nodes this one uses, in order of appearance, each once."""
        return tuple(dict.fromkeys(ref.index for ref in iter_refs((self.args, dict(self.kwargs)))))


@dataclass(frozen=True)
class Unit:
    """The smallest piece that may be cut apart.

    ``name`` is the path of its module, or the scope of its functional operations. Parameters and buffers are
    named as in the original model, in order of use; a name in several units is a shared (tied) tensor.
    """

    index: int
    name: str
    kind: str
    nodes: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Value:
    """What node ``node`` makes and other units use. ``consumers`` are unit indices in execution order."""

    node: int
    name: str
    producer: int
    consumers: tuple[int, ...]


@dataclass(frozen=True)
class GraphInput:
    """One input of the model and the node that stands for it."""

    name: str
    node: int


@dataclass
class ModelGraph:
    """A model as units in execution order.

    Attributes:
        source: Which way in succeeded: ``"pack"``, ``"sequential"``, ``"fx"`` or ``"export"``.
        model: The module that was traced; it owns the tensors.
        modules: Path to module, for every ``module`` node.
        parameters: Qualified name to parameter, for every parameter of the model, used or not, in the model's
            order; a tied parameter is listed once, under its first name.
        buffers: The same for buffers (also those that are not persistent).
        constants: Tensors that the trace met as constants.
        nodes: All nodes; ``nodes[i].index == i``.
        units: All units, in execution order.
        inputs: The inputs of the model that the trace was made for; other optional ones keep their defaults.
        output: The structure that the model returns, with `Ref` leaves.
        forbidden: ``{unit: reason}``: no cut may fall just before that unit.
        mutated: Nodes whose tensors are changed in place after they were made.
        changing: Buffers that a forward pass changes (seen on a batch): name to all units that use them.
        attempts: What each way in that failed said.
    """

    source: str
    model: nn.Module
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    constants: dict[str, torch.Tensor]
    nodes: tuple[Node, ...]
    units: tuple[Unit, ...]
    inputs: tuple[GraphInput, ...]
    output: Any
    forbidden: dict[int, str] = field(default_factory=dict)
    mutated: frozenset[int] = frozenset()
    changing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attempts: tuple[str, ...] = ()

    @cached_property
    def unit_of(self) -> dict[int, int]:
        """Node index to unit index, for all nodes inside units but sources (a source is in every unit that uses it)."""
        return {node: unit.index for unit in self.units for node in unit.nodes if self.nodes[node].op not in SOURCES}

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """The values that at least one other unit uses, in order of creation (inputs and outputs not counted)."""
        consumers: dict[int, dict[int, None]] = {}
        for unit in self.units:
            for ref in self._refs_of(unit):
                if self.unit_of.get(ref, unit.index) != unit.index:
                    consumers.setdefault(ref, {})[unit.index] = None
        return tuple(
            Value(node, self.nodes[node].name, self.unit_of[node], tuple(sorted(users)))
            for node, users in sorted(consumers.items())
        )

    def _refs_of(self, unit: Unit) -> Iterator[int]:
        for node in unit.nodes:
            yield from self.nodes[node].refs

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters used by several units: name to unit indices in execution order."""
        users: dict[str, list[int]] = {}
        for unit in self.units:
            for name in unit.parameters:
                users.setdefault(name, []).append(unit.index)
        return {name: tuple(units) for name, units in users.items() if len(units) > 1}

    def size_bytes(self, name: str) -> int:
        """Bytes of the parameter or buffer called *name*."""
        tensor = self.parameters[name] if name in self.parameters else self.buffers[name]
        return tensor.numel() * tensor.element_size()


def iter_refs(structure: Any) -> Iterator[Ref]:
    """Yield every `Ref` inside nested tuples, lists, dictionaries and slices."""
    if isinstance(structure, Ref):
        yield structure
    elif isinstance(structure, (tuple, list)):
        for item in structure:
            yield from iter_refs(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from iter_refs(item)
    elif isinstance(structure, slice):
        yield from iter_refs((structure.start, structure.stop, structure.step))


def map_refs(structure: Any, function: Callable[[Ref], Any]) -> Any:
    """Return *structure* with every `Ref` replaced by ``function(ref)``; named tuples stay named tuples."""
    if isinstance(structure, Ref):
        return function(structure)
    if isinstance(structure, tuple):
        items = [map_refs(item, function) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, list):
        return [map_refs(item, function) for item in structure]
    if isinstance(structure, dict):
        return {key: map_refs(item, function) for key, item in structure.items()}
    if isinstance(structure, slice):
        return slice(*map_refs((structure.start, structure.stop, structure.step), function))
    return structure

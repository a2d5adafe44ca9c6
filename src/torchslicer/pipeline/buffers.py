"""Keep the buffers of modules as they should be: through recomputation, verification and measurement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.interpreter import buffer_owner

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""

Places = list[tuple[nn.Module, str, torch.Tensor]]


@dataclass(frozen=True)
class BufferSnapshot:
    """Copies of the buffers of some modules, taken at one moment."""

    places: Places

    @classmethod
    def take(cls, modules: Iterable[nn.Module]) -> BufferSnapshot:
        """Copy every buffer of *modules* and of the modules inside them."""
        places: Places = []
        copies: dict[int, torch.Tensor] = {}
        for owner, name, buffer in _buffers_of(modules):
            copies.setdefault(id(buffer), buffer.detach().clone())
            places.append((owner, name, copies[id(buffer)]))
        return cls(places)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules work on the copies for a while.

        The real tensors are swapped out, not overwritten: an in-place copy would invalidate what autograd has
        saved for other micro-batches.
        """
        originals = [(owner, name, owner._buffers[name]) for owner, name, _ in self.places]
        for owner, name, copy in self.places:
            owner._buffers[name] = copy
        try:
            yield
        finally:
            for owner, name, original in originals:
                owner._buffers[name] = original


def _buffers_of(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    seen: set[int] = set()
    for module in modules:
        for owner in module.modules():
            if id(owner) not in seen:
                seen.add(id(owner))
                for name, buffer in owner._buffers.items():
                    if buffer is not None:
                        yield owner, name, buffer


@contextlib.contextmanager
def preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Let the module work on copies of its buffers, and throw them away afterwards."""
    with BufferSnapshot.take([module]).in_place():
        yield


class BufferWatch:
    """Sees, while a graph runs once, which buffers its units change: in place, or by putting another tensor there."""

    def __init__(self, graph: ModelGraph) -> None:
        self._paths = {id(module): path for path, module in graph.model.named_modules()}
        self._places = [dict.fromkeys(_places_of(graph, unit.index)) for unit in graph.units]
        self._first: dict[Place, torch.Tensor | None] = {
            (owner, name): owner._buffers[name] for places in self._places for owner, name in places
        }
        self._replaced: set[Place] = set()
        self._changed: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def watching(self, unit: int) -> Iterator[None]:
        """Watch the buffers of *unit* while the block runs."""
        before = [(place, place[0]._buffers[place[1]]) for place in self._places[unit]]
        versions = [None if tensor is None else tensor._version for _, tensor in before]
        yield
        for (place, tensor), version in zip(before, versions, strict=True):
            if place[0]._buffers.get(place[1]) is not tensor:
                self._replaced.add(place)
            elif tensor is not None and tensor._version != version:
                self._changed[id(tensor)] = tensor

    def changed_memory(self) -> set[int]:
        """Return the addresses of buffers that were changed in place."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._changed.values()} - {0}

    def changing(self) -> dict[str, tuple[int, ...]]:
        """Return the names of changed buffers, each with all units that use it, under any name."""
        replaced = {id(self._first[place]) for place in self._replaced if self._first[place] is not None}
        users: dict[str, tuple[int, ...]] = {}
        for place, first in self._first.items():
            if place in self._replaced or id(first) in replaced or id(first) in self._changed:
                owner, name = place
                path = self._paths.get(id(owner), type(owner).__name__)
                users[f"{path}.{name}".lstrip(".")] = tuple(self._users(place, first))
        return users

    def _users(self, place: Place, tensor: torch.Tensor | None) -> Iterator[int]:
        for unit, places in enumerate(self._places):
            if place in places or (tensor is not None and any(self._first[other] is tensor for other in places)):
                yield unit


def _places_of(graph: ModelGraph, unit: int) -> Iterator[Place]:
    for index in graph.units[unit].nodes:
        node = graph.nodes[index]
        if node.op == "buffer":
            yield buffer_owner(graph, node.target), node.target.rpartition(".")[2]
        elif node.op == "module":
            for owner in graph.modules[node.target].modules():
                yield from ((owner, name) for name in owner._buffers)

"""Keep the buffers of modules as they should be: through recomputation, verification and measurement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

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

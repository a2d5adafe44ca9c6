"""Run a model to look at it, and leave no trace: what verification, analysis and measurement have in common."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchslicer.graph.attributes import AttributeSnapshot
from torchslicer.pipeline.buffers import preserved_buffers
from torchslicer.pipeline.rng import preserved_rng


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give back buffers, attributes of modules, and the random generators of torch, numpy and Python as they were."""
    attributes = AttributeSnapshot.take(model.modules())
    python, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one
    try:
        with preserved_rng(), preserved_buffers(model):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002 - the global one
        attributes.restore()


def seed_all(number: int) -> None:
    """Seed the global random generators that a forward pass may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global one


def own_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return *inputs* with tensors of their own, since a model may change its inputs in place."""
    leaves, spec = pytree.tree_flatten(dict(inputs))
    copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    copied: dict[str, Any] = pytree.tree_unflatten(copies, spec)
    return copied

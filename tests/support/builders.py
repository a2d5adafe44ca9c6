"""Functions that build models by name, and models that only their own code can make."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.support import awkward, models, tvshim

tvshim.declare()  # in workers, too

CASES = {case.name: case for case in (*models.MAIN, *awkward.EXACT, *awkward.RANDOM)}


def make_case(name: str, dropout: float = 0.0) -> nn.Module:
    """Return the model of a case, with weights that differ from process to process."""
    return CASES[name].build(dropout)


class Unusual(nn.Module):
    """What no description carries: a lambda, a lock, hooks, a parameter in a list, a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.activation: Callable[[Tensor], Tensor] = lambda x: torch.tanh(x)  # noqa: PLW0108 - a lambda on purpose
        self.lock = threading.Lock()
        self.again = [self.second.weight]
        self.signs = torch.tensor([1.0, -1.0] * 8)
        self.second.register_forward_hook(lambda module, args, output: output * 1.5)
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 16)."""
        if bool(x.sum() < -1e9):  # nobody can trace this, so that the module is called whole
            return x
        with self.lock:
            return self.activation(self.second(self.first(x))) * self.signs @ self.again[0]


def make_unusual(width: int = 4) -> nn.Module:
    """Three modules of which a description can carry one."""
    return nn.Sequential(Unusual(), Unusual(), nn.Linear(16, width))


def make_random() -> nn.Module:
    """A tensor that is neither parameter nor buffer, and another one in each process."""
    model = nn.Sequential(Unusual(), nn.Linear(16, 4))
    model[0].signs = torch.randn(16)
    return model


def make_elsewhere() -> nn.Module:
    """Another model in each process."""
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(1.0 / os.getpid()), nn.Linear(16, 4))


def make_nothing() -> object:
    """No model."""
    return object()


def make_failing(folder: str) -> nn.Module:
    """Fails when it is called for the second time: in the worker."""
    (Path(folder) / str(os.getpid())).touch()
    if len(list(Path(folder).iterdir())) > 1:
        raise OSError("the disk with the vocabulary is not mounted")
    return models.mlp4()


def make_constant() -> nn.Module:
    """The forward pass makes a tensor where a parameter is."""
    return Placed()


class Placed(nn.Module):
    """Asks a parameter for its device when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 16)."""
        return self.last(self.first(x) + torch.arange(16, device=self.first.weight.device))  # type: ignore[no-any-return]


class Census(nn.Module):
    """Writes down how many values the parameters in its process have, all told."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        """x: anything."""
        if bool(x.sum() < -1e30):  # nobody can trace this, so that the module is called whole
            return x
        path = Path(self.folder) / f"{os.getpid()}.json"
        path.write_text(json.dumps(sorted(parameters_in_memory())), encoding="utf-8")
        return x


def parameters_in_memory() -> list[int]:
    """Number of values of each parameter of this process that has memory; what shares memory counts once."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) is nn.Parameter and not thing.is_meta:  # isinstance would ask every object for its class
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes() // thing.element_size()
    return [count for count in found.values() if count > 1]  # optimizers are warmed up on one of a single value


def make_census(folder: str, values: bool = False) -> nn.Module:
    """Three linear layers, one for each stage, and a head with the first one's weights; with *values* not on 'meta'."""
    first = nn.Linear(64, 32, bias=False)
    layers = [first, Census(folder), nn.Linear(32, 48), Census(folder), nn.Linear(48, 32), Census(folder)]
    if values:
        torch.ones(1).item()
    return nn.Sequential(*layers, Tied(first.weight))


class Tied(nn.Module):
    """A linear layer with the weight of another one, transposed."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, 32)."""
        return x @ self.weight


def pack_moe(model: nn.Module) -> list[nn.Module]:
    """Stages of the MoE case."""
    return list(models.pack_moe(model))

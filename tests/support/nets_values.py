"""Small models whose values are awkward to cut apart: forks, skips, in-place ops, structures, ties, frozen parts.

All take vectors (B, 16) and give scores for 4 classes (B, 4) unless they take words (B, T).
"""

# Calling a module gives Any for mypy; casting every return would hide the models.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.models import mlp4


class Net(nn.Module):
    """Four linear layers, for subclasses to use as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)


class Functional(Net):
    """S03: functional ops, a method with a dynamic size, a constant factor."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        x = F.relu(self.b(x)) * 0.5
        return self.d(x.view(x.size(0), -1) * 2)


class CatBranches(Net):
    """Two branches joined by torch.cat and a reduction over a new dimension."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x), self.b(x)
        both = torch.cat([left, right], dim=1)
        return self.d(self.c(both.view(-1, 2, 16).mean(1)))


class ResidualInside(Net):
    """A residual that an even cut leaves inside a stage."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(torch.tanh(self.c(torch.tanh(self.b(h) + h))))


class ResidualAcross(Net):
    """S04: a residual over two blocks, so that every cut in between is crossed."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.d(self.c(torch.tanh(self.b(h))) + h)


class InPlaceAdd(Net):
    """``h += k`` and an in-place ReLU function."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = self.b(h)
        k += x
        h = F.relu(self.c(k), inplace=True)
        return self.d(h)


class InPlaceFirst(Net):
    """S17: in-place ops right after a module, with a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x += self.shift
        x = self.b(x)
        x.mul_(0.5).add_(1.0)
        x = self.c(x)
        x.clamp_(min=0)
        return self.d(x)


class Fork(Net):
    """One value used on both sides of a cut: ``c(b(h)) + d(h)``."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.head(self.c(self.b(h)) + h * 3) + self.d(h)


class ManyUses(Net):
    """One value used five times over all units: the order of the sum of its gradient decides the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = torch.tanh(self.b(h)) * h
        z = torch.tanh(self.c(y) + h)
        w = torch.sigmoid(self.e(z)) * h + h.sin()
        return self.d(w + h) + h.mean(1, keepdim=True)


class RootTensors(nn.Module):
    """Parameters and buffers of the root used by name; a parameter that is used twice."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.rand(16) + 0.5)
        self.register_buffer("offset", torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.scale + self.offset)
        return self.last(torch.tanh(x) * self.scale)


class Reused(nn.Module):
    """One linear layer called three times and one ReLU module called everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.relu, self.head = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.relu(self.inner(x))
        return self.head(x)


class Scaled(nn.Module):
    """A block with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, gain: float = 1.0, gate: Tensor | None = None) -> Tensor:
        x = self.linear(x) * gain
        return x if gate is None else x * gate


class Keywords(Net):
    """Keyword arguments, numbers and tensors, to own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Scaled(), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(self.a(x), gain=0.5))
        return self.d(self.two(x, gate=torch.sigmoid(self.b(x))))


class TwoInputs(Net):
    """Two inputs, the second needed late."""

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.d(torch.tanh(self.c(h + late)) * late)


class Opaque(nn.Module):
    """Data-dependent control flow (no tracer can enter it); hands on a dictionary of all kinds of values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x) if bool(x.sum() > -1e9) else x
        return {"h": h, "mask": h > 0, "none": None, "flag": True, "count": 3, "pair": (h * 2, x.new_ones(1).long())}


class Consumer(nn.Module):
    """Takes what `Opaque` made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, values: dict[str, Any], pair: tuple[Tensor, Tensor]) -> Tensor:
        if bool(values["h"].sum() < -1e9):  # no tracer can enter this module either
            return pair[0]
        if values["none"] is not None or values["flag"] is not True or pair[1].dtype != torch.int64:
            raise TypeError("a value was changed on its way")
        return self.linear(torch.where(values["mask"], values["h"], pair[0] * 0.1)) * values["count"]


class Structures(Net):
    """S15: dict, tuple, None, bool and int between units."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.use = Opaque(), Consumer()

    def forward(self, x: Tensor) -> Tensor:
        values = self.make(torch.tanh(self.a(x)))
        h = self.b(values["h"])
        return self.d(torch.tanh(self.use(values, values["pair"])) + h)


class IntsAndBools(nn.Module):
    """S16: position numbers and a mask made in front and used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(31, 16), nn.Embedding(31, 16)
        self.one, self.two, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 31)

    def forward(self, words: Tensor) -> Tensor:
        mask, numbers = words != 0, words.cumsum(1) % 31
        x = torch.tanh(self.one(self.embed(words)))
        x = torch.tanh(self.two(x)).masked_fill(~mask.unsqueeze(-1), 0.0)
        return self.head(x + self.place(numbers)).transpose(1, 2)


class TiedTwice(Net):
    """One weight in two linear layers, first and last but one."""

    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class TiedThrice(Net):
    """One weight in three places: two layers and a functional use (transposed) by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        x = torch.tanh(F.linear(self.c(x), self.a.weight.t()))
        return self.d(x)


class TiedLM(nn.Module):
    """S11: embedding and head hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.emb(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).transpose(1, 2)


def frozen(*names: str) -> nn.Module:
    """MLP4 with the named layers frozen."""
    model = mlp4()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


class FrozenEmbedding(nn.Module):
    """Integers into a frozen embedding that may be a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.embed.weight.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words)).transpose(1, 2)

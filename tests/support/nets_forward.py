"""Small models whose ``forward`` is awkward to trace: control flow, contexts, custom functions, modes, noise.

All take vectors (B, 16) and give scores for 4 classes (B, 4) unless they take words (B, T).
"""

# Calling a module gives Any for mypy; casting every return would hide the models.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.nets_values import Net


class FlowInside(Net):
    """A submodule with data-dependent control flow, to be kept whole."""

    class Block(nn.Module):
        """Which branch is taken depends on the data."""

        def __init__(self) -> None:
            super().__init__()
            self.yes, self.no = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.yes(x) if x.mean() > 0 else self.no(x)

    def __init__(self) -> None:
        super().__init__()
        self.block = self.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.b(self.block(torch.tanh(self.a(x))))))


class FlowInRoot(nn.Module):
    """S02: data-dependent control flow in the root; children registered in another order than they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)
        self.body = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if x.mean() > 0:
            x = torch.tanh(x)
        return self.head(x)


class ShapeFlow(Net):
    """Control flow on a shape: needs example inputs, the same for every batch."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 16:
            raise ValueError("16 features, please")
        return self.d(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Arange(nn.Module):
    """Positions made by torch.arange from the shape of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(31, 16), nn.Embedding(40, 16), nn.Linear(16, 31)

    def forward(self, words: Tensor) -> Tensor:
        positions = torch.arange(words.size(1), device=words.device)
        return self.head(torch.tanh(self.embed(words) + self.place(positions))).transpose(1, 2)


class NoGradBlock(Net):
    """A branch under no_grad and a detached value."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        with torch.no_grad():
            weight = torch.sigmoid(self.b(h))
        return self.d(self.c(h * weight) + h.detach())


class AutocastBlock(Net):
    """A block that switches autocast on by itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(h)
        return self.d(torch.tanh(h.float()))


class Triple(torch.autograd.Function):
    """Three times the input, with a gradient of its own (five times)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 5


class CustomFunction(Net):
    """A custom autograd function in forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = Triple.apply(torch.tanh(self.a(x)))  # type: ignore[no-untyped-call]
        return self.d(torch.tanh(self.b(h)))


class AuxHead(Net):
    """Another structure in training than in evaluation: an auxiliary head and a batch statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        out = self.d(torch.tanh(self.b(h)))
        if self.training:
            out = out + 0.3 * self.aux(h)
        return out


class SharedBuffer(nn.Module):
    """Two modules that share one buffer and one BatchNorm that is called twice."""

    class Shift(nn.Module):
        """Adds a buffer."""

        offset: Tensor

        def __init__(self, offset: Tensor) -> None:
            super().__init__()
            self.register_buffer("offset", offset)
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.offset)

    def __init__(self) -> None:
        super().__init__()
        offset = torch.randn(16)
        self.one, self.two, self.head = self.Shift(offset), self.Shift(offset), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.one(x)))
        return self.head(torch.tanh(self.norm(self.two(x))))


class Unused(Net):
    """A layer and a parameter that forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.a(x)))


class Disordered(nn.Module):
    """Children registered in another order than they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.middle, self.body = nn.Linear(16, 4), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.body(x)))))


class Dense(nn.Module):
    """Every layer sees the outputs of all before it (lists that grow, torch.cat)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"l{i}": nn.Linear(16 + 4 * i, 4) for i in range(4)})
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers.values():
            seen.append(torch.tanh(layer(torch.cat(seen, 1))))
        return self.head(torch.cat(seen, 1))


class Attention(nn.Module):
    """MultiheadAttention (returns a tuple with None) and an encoder layer without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 31)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        mixed, _ = self.attend(x, x, x, need_weights=False)
        return self.head(self.layer(x + mixed)).transpose(1, 2)


class Views(nn.Module):
    """Values that are views of one tensor: chunk, unbind, strided and transposed (S35)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.one, self.two, self.head = (
            nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(16, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.wide(x).chunk(2, dim=1)
        first = torch.tanh(self.one(left))
        second = torch.tanh(self.two(right[:, ::2]))
        up, down = torch.stack([first, second]).unbind(0)
        mixed = torch.einsum("bi,bi->bi", up, down).unsqueeze(-1).transpose(1, 2)
        return self.head(mixed.squeeze(1) + right)


class WeightNorm(nn.Module):
    """A parametrised layer (weight normalisation)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Wrapped(nn.Module):
    """S05: the whole model is one child."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class PairOutput(Net):
    """Returns a tuple; its loss takes the tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        return self.d(torch.tanh(self.b(h))), h


class PairLoss(nn.Module):
    """Cross entropy of the first output and a penalty on the second, both means over the samples."""

    reduction = "mean"

    def forward(self, outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], target) + 0.1 * outputs[1].pow(2).mean()


class FunctionalDropout(Net):
    """F.dropout with the flag of the root."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.a(x)), 0.4, training=self.training)
        return self.d(F.dropout(torch.tanh(self.b(h)), 0.4, self.training))


class Noise(Net):
    """Random numbers drawn in forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = h + 0.1 * torch.randn_like(h)
        return self.d(torch.tanh(self.b(h)) * torch.rand_like(h))

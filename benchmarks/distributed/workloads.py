"""The workloads of the distributed benchmark, of the same sizes as those of the peers' scripts.

resnet  ResNet-18, CIFAR stem (3x3 stride 1, no max-pool), 3x32x32, batch 64
mlp     8 x (Linear(1024, 1024), ReLU), batch 512: 2 MiB at the cut
gpt     8 layers, d 256, 4 heads, vocabulary 2048, T 128, batch 16, output weights not tied
ewise   8 x (LayerNorm(1024), ReLU), batch 512: 2 MiB at the cut and almost no arithmetic, so bound by transport
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]

SIZES = {
    # batch, batches of a measured epoch, batches of the warm-up epoch
    "resnet": (64, 3, 1),
    "mlp": (512, 8, 2),
    "gpt": (16, 4, 1),
    "ewise": (512, 60, 10),
}
OPTIMIZER = {"name": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


class Block(nn.Module):
    """A pre-norm transformer block with causal attention: (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads_of(part) for part in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.ln2(x)), approximate="tanh"))

    def heads_of(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Gpt(nn.Module):
    """Tokens (B, T) to logits (B, V, T)."""

    def __init__(
        self, vocabulary: int = 2048, width: int = 256, layers: int = 8, heads: int = 4, length: int = 128
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)).transpose(1, 2)


def build_model(name: str) -> nn.Module:
    """Return the model of a workload, always with the same weights."""
    torch.manual_seed(0)
    if name == "resnet":
        return _resnet()
    if name == "gpt":
        return Gpt()
    layer = (lambda: nn.Linear(1024, 1024)) if name == "mlp" else (lambda: nn.LayerNorm(1024))
    return nn.Sequential(*[module for _ in range(8) for module in (layer(), nn.ReLU())])


def _resnet() -> nn.Module:
    sys.path.insert(0, str(ROOT))
    from tests.support import tvshim

    tvshim.declare()
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def make_batches(name: str) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a measured epoch."""
    size, count, _ = SIZES[name]
    generator = torch.Generator().manual_seed(1)
    return [_batch(name, size, generator) for _ in range(count)]


def _batch(name: str, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if name == "resnet":
        images = torch.randn(size, 3, 32, 32, generator=generator)
        return images, torch.randint(0, 10, (size,), generator=generator)
    if name == "gpt":
        tokens = torch.randint(0, 2048, (size, 129), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(size, 1024, generator=generator), torch.randint(0, 1024, (size,), generator=generator)


class Loader:
    """Batches whose first epoch (the warm-up) is shorter."""

    def __init__(self, name: str) -> None:
        self.batches = make_batches(name)
        self.warm = SIZES[name][2]
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epoch += 1
        return iter(self.batches[: self.warm] if self.epoch == 1 else self.batches)

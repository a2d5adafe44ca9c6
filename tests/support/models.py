"""The models of the parity tests: each with a seeded builder, a maker of seeded batches and its loss.

Shapes in comments: B samples, T positions, C channels or classes, V words, D features.
Linear layers in front of a normalisation or a softmax have no bias: the gradient of such a bias is zero but for
rounding, and Adam turns rounding into full-size steps, so no two orders of summation would agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Any, ...]
BatchMaker = Callable[[torch.Generator, int], Batch]
Loss = Callable[[nn.Module, Batch, Any], Tensor]


def call_and_compare(model: nn.Module, batch: Batch, criterion: Any) -> Tensor:
    """Return the loss of ``(input, ..., target)``: the plain way of a training loop."""
    *inputs, target = batch
    loss: Tensor = criterion(model(*inputs), target)
    return loss


@dataclass(frozen=True)
class Case:
    """One model with everything needed to train it, in TorchSlicer and by hand.

    Attributes:
        build: Makes the model; takes the dropout probability (ignored where there is no dropout).
        batch: Makes one batch ``(input, ..., target)`` of a number of samples.
        criterion: Makes the loss module.
        random: Draws random numbers in training even with dropout 0.
        batch_norm: Has statistics of the batch, so micro-batches change it by nature.
        needs_example: Can only be traced with example inputs.
        pack: Pack function for models that are given as stages.
        loss: The loss of one batch in the hand-written loop.
    """

    name: str
    build: Callable[[float], nn.Module]
    batch: BatchMaker
    criterion: Callable[[], Any] = nn.CrossEntropyLoss
    batch_size: int = 8
    random: bool = False
    batch_norm: bool = False
    needs_example: bool = False
    pack: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    loss: Loss = call_and_compare

    def model(self, *, dropout: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return a fresh model, the same for the same seed, without touching the caller's generator."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build(dropout).to(dtype)

    def batches(
        self, count: int, *, size: int | None = None, seed: int = 1, dtype: torch.dtype = torch.float32
    ) -> list[Batch]:
        """Return *count* seeded batches; float tensors in *dtype*."""
        generator = torch.Generator().manual_seed(seed)
        made = [self.batch(generator, size or self.batch_size) for _ in range(count)]
        return [tuple(_cast(item, dtype) for item in batch) for batch in made]

    def example(self, *, dtype: torch.dtype = torch.float32) -> Any:
        """Return example inputs: the tensor, or the tuple of inputs where there are several."""
        *inputs, _ = self.batches(1, seed=99, dtype=dtype)[0]
        return inputs[0] if len(inputs) == 1 else tuple(inputs)


def _cast(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item


def vectors(features: int = 16, classes: int = 4) -> BatchMaker:
    """Batches of (B, D) floats with class targets (B,)."""

    def make(generator: torch.Generator, size: int) -> Batch:
        x = torch.randn(size, features, generator=generator)
        return x, torch.randint(classes, (size,), generator=generator)

    return make


def images(channels: int = 3, side: int = 16, classes: int = 10) -> BatchMaker:
    """Batches of (B, C, H, W) floats with class targets (B,)."""

    def make(generator: torch.Generator, size: int) -> Batch:
        x = torch.randn(size, channels, side, side, generator=generator)
        return x, torch.randint(classes, (size,), generator=generator)

    return make


def tokens(vocab: int = 31, length: int = 12, *, classes: int | None = None, ignore: float = 0.0) -> BatchMaker:
    """Batches of (B, T) word numbers with targets (B, T), a share *ignore* of them -100."""

    def make(generator: torch.Generator, size: int) -> Batch:
        x = torch.randint(vocab, (size, length), generator=generator)
        y = torch.randint(classes or vocab, (size, length), generator=generator)
        hidden = torch.rand(size, length, generator=generator) < ignore
        return x, y.masked_fill(hidden, -100)

    return make


# MLPs


def mlp4(dropout: float = 0.0) -> nn.Sequential:
    """MLP4 of the scenarios: 5 linear layers, ReLU (and dropout, where asked) between them."""
    layers: list[nn.Module] = []
    for features in (16, 32, 32, 32):
        layers += [nn.Linear(features, 32), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(32, 4))


def batchnorm_mlp(dropout: float = 0.0) -> nn.Sequential:
    """Linear, BatchNorm1d, ReLU, dropout; twice."""
    return nn.Sequential(
        nn.Linear(16, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4),
    )  # fmt: skip


def batchnorm_convnet(dropout: float = 0.0) -> nn.Sequential:
    """Conv-BN-ReLU three times and a head, for 3x8x8 images."""
    blocks: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 8), (8, 8)):
        blocks += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, 4))


def resnet18(dropout: float = 0.0) -> nn.Module:
    """torchvision's ResNet-18 with a CIFAR stem; in-place ReLU modules that are used twice in each block."""
    from torchvision.models import resnet18 as build

    model: nn.Module = build(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


# U-Net


class UNet(nn.Module):
    """Three levels; the skips reach from the first units to the last. GroupNorm, functional ops between modules."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.down1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.down2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.Conv2d(16, 8, 3, padding=1)
        self.up1 = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to class scores (B, 5, H, W)."""
        one = F.silu(self.norm1(self.down1(x)))
        two = F.silu(self.norm2(self.down2(F.max_pool2d(one, 2))))
        low = torch.tanh(self.middle(F.avg_pool2d(two, 2)))
        low = F.dropout(low, self.dropout, training=self.training)
        up = F.interpolate(low, size=two.shape[2:], mode="bilinear", align_corners=False)
        up = torch.tanh(self.up2(torch.cat([up, two], dim=1)))
        up = F.interpolate(up, scale_factor=2.0, mode="nearest")
        up = torch.tanh(self.up1(torch.cat([up, one], dim=1)))
        scores: Tensor = self.head(up)
        return scores


def segmentation(generator: torch.Generator, size: int) -> Batch:
    """Images (B, 3, 8, 8) with a class for each pixel (B, 8, 8)."""
    x = torch.randn(size, 3, 8, 8, generator=generator)
    return x, torch.randint(5, (size, 8, 8), generator=generator)


# GPT


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        share = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=share, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        out: Tensor = x + self.drop(self.narrow(F.gelu(self.wide(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """A small GPT; the head's weight is the embedding's (tied), the first and the last unit."""

    positions: Tensor

    def __init__(self, dropout: float = 0.0, *, vocab: int = 31, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(32, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(32), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        """Map word numbers (B, T) to logits (B, V, T)."""
        x = self.drop(self.embed(words) + self.place(self.positions[: words.size(1)]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


# LSTM


class Tagger(nn.Module):
    """Embedding, two LSTM layers with dropout between them, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 12)
        self.lstm = nn.LSTM(12, 10, num_layers=2, dropout=dropout, batch_first=True)
        self.mix = nn.Linear(10, 10)
        self.head = nn.Linear(10, 5)

    def forward(self, words: Tensor) -> Tensor:
        """Map word numbers (B, T) to tag scores (B, C, T)."""
        states, _ = self.lstm(self.embed(words))
        scores: Tensor = self.head(torch.tanh(self.mix(states)))
        return scores.transpose(1, 2)


# Mixture of experts


class MoEBlock(nn.Module):
    """Routes each position to its two best experts; returns the output and the router's auxiliary loss.

    The auxiliary loss is the mean squared log-sum-exp of the router's logits: linear in the positions, so that the mean
    over micro-batches is the mean over the batch.
    """

    def __init__(self, width: int = 16, experts: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (B, T, D) to ((B, T, D), scalar)."""
        h = self.norm(x)
        logits = self.router(h)
        best, chosen = logits.topk(2, dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        outputs = torch.stack([torch.tanh(expert(h)) for expert in self.experts], dim=-1)
        mixed = (outputs * gates.unsqueeze(-2)).sum(-1)
        return x + self.drop(mixed), torch.logsumexp(logits, -1).pow(2).mean()


class MoE(nn.Module):
    """Embedding, two blocks of experts, a head. Trained as packed stages; ``with_aux`` is for the hand-written loop."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(MoEBlock(dropout=dropout) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 31, bias=False)

    def with_aux(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, V, T) and the sum of the auxiliary losses."""
        x, total = self.embed(words), torch.zeros((), dtype=self.head.weight.dtype)
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return self.head(self.norm(x)).transpose(1, 2), total

    def forward(self, words: Tensor) -> Tensor:
        """Map word numbers (B, T) to logits (B, V, T)."""
        return self.with_aux(words)[0]


AUX_WEIGHT = 0.01


def pack_moe(model: nn.Module) -> Sequence[nn.Module]:
    """The MoE as library stages."""
    import torchslicer as ts

    assert isinstance(model, MoE)
    middle = [ts.MoEBlockStage(block, aux_loss_weight=AUX_WEIGHT) for block in model.blocks]
    return [ts.SimpleEmbedStage(model.embed), *middle, ts.CausalLMHeadStage(model.norm, model.head)]


def moe_loss(model: nn.Module, batch: Batch, criterion: Any) -> Tensor:
    """Return ``loss + weight * aux`` for the hand-written loop."""
    assert isinstance(model, MoE)
    logits, aux = model.with_aux(batch[0])
    loss: Tensor = criterion(logits, batch[1]) + AUX_WEIGHT * aux
    return loss


MLP = Case("mlp", mlp4, vectors())
RESNET = Case("resnet18", resnet18, images(), batch_size=4, batch_norm=True)
UNET = Case("unet", UNet, segmentation)
GPT_CASE = Case("gpt", GPT, tokens())
TAGGER = Case("lstm", Tagger, tokens(classes=5, length=6, ignore=0.3))
MOE = Case("moe", MoE, tokens(length=6), pack=pack_moe, loss=moe_loss)
BN_MLP = Case("batchnorm_mlp", batchnorm_mlp, vectors(), batch_size=16, batch_norm=True)
BN_CONV = Case("batchnorm_conv", batchnorm_convnet, images(side=8, classes=4), batch_norm=True)

MAIN = (MLP, RESNET, UNET, GPT_CASE, TAGGER, MOE)

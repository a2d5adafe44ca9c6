"""The awkward models as cases: what users of split training libraries stumbled over.

`EXACT` draws no random numbers, so that it can be compared with a hand-written loop bit for bit; `RANDOM` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Batch, Case, batchnorm_convnet, images, mlp4, tokens, vectors
from tests.support.nets_forward import (
    Arange,
    Attention,
    AutocastBlock,
    AuxHead,
    CustomFunction,
    Dense,
    Disordered,
    FlowInside,
    FunctionalDropout,
    NoGradBlock,
    Noise,
    PairLoss,
    PairOutput,
    ShapeFlow,
    SharedBuffer,
    Unused,
    Views,
    WeightNorm,
    Wrapped,
)
from tests.support.nets_values import (
    CatBranches,
    Fork,
    FrozenEmbedding,
    Functional,
    InPlaceAdd,
    InPlaceFirst,
    IntsAndBools,
    Keywords,
    ManyUses,
    Net,
    ResidualAcross,
    ResidualInside,
    Reused,
    RootTensors,
    Structures,
    TiedLM,
    TiedThrice,
    TiedTwice,
    TwoInputs,
    frozen,
)


def two_vectors(generator: torch.Generator, size: int) -> Batch:
    """Two float inputs and class targets."""
    x, late = torch.randn(size, 16, generator=generator), torch.randn(size, 16, generator=generator)
    return x, late, torch.randint(4, (size,), generator=generator)


def bytes_batch(generator: torch.Generator, size: int) -> Batch:
    """uint8 images and class targets."""
    x = torch.randint(256, (size, 16), generator=generator, dtype=torch.uint8)
    return x, torch.randint(4, (size,), generator=generator)


class FromBytes(Net):
    """uint8 input, converted by the model."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.d(torch.tanh(self.a(x.to(self.a.weight.dtype) / 255)))
        return scores


def _case(name: str, kind: type[nn.Module], **options: Any) -> Case:
    return Case(name, lambda dropout: kind(), options.pop("batch", vectors()), **options)


EXACT: tuple[Case, ...] = (
    _case("functional", Functional),
    _case("cat", CatBranches),
    _case("residual_inside", ResidualInside),
    _case("residual_across", ResidualAcross),
    _case("inplace_add", InPlaceAdd),
    _case("inplace_first", InPlaceFirst),
    Case("inplace_relu", lambda dropout: nn.Sequential(
        nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(inplace=True),
        nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)), vectors()),
    _case("fork", Fork),
    _case("many_uses", ManyUses),
    _case("root_tensors", RootTensors),
    _case("reused", Reused),
    _case("keywords", Keywords),
    _case("two_inputs", TwoInputs, batch=two_vectors),
    _case("structures", Structures),
    _case("ints_and_bools", IntsAndBools, batch=tokens(length=6)),
    _case("tied_twice", TiedTwice),
    _case("tied_thrice", TiedThrice),
    _case("tied_lm", TiedLM, batch=tokens(vocab=50, length=6)),
    Case("frozen_first", lambda dropout: frozen("0"), vectors()),
    Case("frozen_front_half", lambda dropout: frozen("0", "2"), vectors()),
    Case("frozen_last", lambda dropout: frozen("6", "8"), vectors()),
    _case("frozen_embedding", FrozenEmbedding, batch=tokens(length=6)),
    _case("flow_inside", FlowInside),
    _case("shape_flow", ShapeFlow, needs_example=True),
    _case("arange", Arange, batch=tokens(length=6), needs_example=True),
    _case("no_grad", NoGradBlock),
    _case("autocast_block", AutocastBlock),
    _case("custom_function", CustomFunction),
    _case("aux_head", AuxHead),
    _case("shared_buffer", SharedBuffer, batch_norm=True),
    _case("unused", Unused),
    _case("disordered", Disordered),
    _case("dense", Dense),
    _case("attention", Attention, batch=tokens(length=6)),
    _case("views", Views),
    _case("weight_norm", WeightNorm),
    Case("wrapped", lambda dropout: Wrapped(mlp4()), vectors()),
    Case("nested_sequential", lambda dropout: nn.Sequential(nn.Sequential(*mlp4())), vectors()),
    _case("pair_output", PairOutput, criterion=PairLoss),
    _case("from_bytes", FromBytes, batch=bytes_batch),
    Case("batchnorm_conv", batchnorm_convnet, images(side=8, classes=4), batch_norm=True),
)  # fmt: skip

RANDOM: tuple[Case, ...] = (
    _case("functional_dropout", FunctionalDropout, random=True),
    _case("noise", Noise, random=True),
    Case("mlp_dropout", lambda dropout: mlp4(0.5), vectors(), random=True),
)

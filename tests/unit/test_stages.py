"""The stage classes for pack functions compute what the same lines without them compute."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchslicer.errors import UserError
from torchslicer.graph.auxloss import collect_aux_losses
from torchslicer.graph.stages import (
    AuxInputStage,
    BlockStage,
    CausalLMHeadStage,
    GPT2EmbedStage,
    MoEBlockStage,
    SimpleEmbedStage,
)

HIDDEN = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Rotary(nn.Module):
    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert position_ids.tolist() == [[0, 1, 2]]
        return position_ids.float().cos(), position_ids.float().sin()


class Block(nn.Module):
    def __init__(self, kind: type | None) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, hidden: torch.Tensor, position_embeddings: object = None) -> object:
        if position_embeddings is not None:
            cos, sin = position_embeddings
            hidden = hidden * cos[..., None] + sin[..., None]
        return hidden if self.kind is None else self.kind((hidden, "cache"))


@pytest.mark.parametrize("kind", [None, tuple, list])
def test_block_stage_unwraps(kind: type | None) -> None:
    assert torch.equal(BlockStage(Block(kind))(HIDDEN), HIDDEN)


def test_block_stage_passes_rotary_embeddings() -> None:
    t = torch.arange(3.0)[None, :, None]
    assert torch.equal(BlockStage(Block(tuple), rotary_emb=Rotary())(HIDDEN), HIDDEN * t.cos() + t.sin())


def test_embed_stages() -> None:
    wte, wpe = nn.Embedding(10, 4), nn.Embedding(8, 4)
    assert torch.equal(GPT2EmbedStage(wte, wpe, nn.Identity())(IDS), wte(IDS) + wpe(torch.arange(3)))
    assert torch.equal(SimpleEmbedStage(wte)(IDS), wte(IDS))


def test_head_stage_suits_cross_entropy() -> None:
    norm, head = nn.LayerNorm(4), nn.Linear(4, 10)
    logits = CausalLMHeadStage(norm, head)(HIDDEN)
    assert torch.equal(logits, head(norm(HIDDEN)).transpose(1, 2))
    expected = nn.functional.cross_entropy(head(norm(HIDDEN)).reshape(-1, 10), IDS.reshape(-1))
    torch.testing.assert_close(nn.CrossEntropyLoss()(logits, IDS), expected)
    assert torch.equal(CausalLMHeadStage(None, head)(HIDDEN), head(HIDDEN).transpose(1, 2))


def test_aux_input_stage_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AuxInputStage()

    class Masked(AuxInputStage):
        def forward(self, main: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
            return main * mask

    assert Masked.accepts_aux_inputs
    assert Masked()(torch.ones(2), mask=torch.tensor([1.0, 0.0])).tolist() == [1.0, 0.0]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.router(hidden).square().mean()


def test_moe_stage_hands_over_its_loss() -> None:
    block = Routed()
    stage = MoEBlockStage(block, aux_loss_weight=0.1)
    with collect_aux_losses() as losses:
        assert torch.equal(stage(HIDDEN), HIDDEN)
    [(aux, weight)] = losses
    (weight * aux).backward()
    gradient = block.router.weight.grad.clone()
    block.zero_grad()
    (0.1 * block(HIDDEN)[1]).backward()
    assert torch.equal(gradient, block.router.weight.grad)
    assert stage.pop_aux_loss() is None, "a collected loss must not keep its graph alive"


def test_moe_stage_keeps_its_loss_when_nobody_collects() -> None:
    stage = MoEBlockStage(Routed(), aux_loss_weight=0.1)
    stage(HIDDEN)
    popped = stage.pop_aux_loss()
    assert torch.equal(popped, stage.block(HIDDEN)[1] * 0.1)
    assert stage.pop_aux_loss() is None


def test_moe_stage_can_be_copied_after_forward() -> None:
    stage = MoEBlockStage(Routed())
    stage(HIDDEN)
    assert copy.deepcopy(stage).pop_aux_loss() is None
    assert stage.pop_aux_loss() is not None


class Returns(nn.Module):
    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden: torch.Tensor) -> object:
        return self.output


def test_moe_stage_without_loss_and_with_wrong_outputs() -> None:
    with collect_aux_losses() as losses:
        assert MoEBlockStage(Returns((HIDDEN, None)))(HIDDEN) is HIDDEN
    assert losses == []
    with pytest.raises(UserError, match=r"Returns must return \(hidden, aux_loss\), got tuple of length 3"):
        MoEBlockStage(Returns((1, 2, 3)))(HIDDEN)
    with pytest.raises(UserError, match=r"got shape \(2,\)"):
        MoEBlockStage(Returns((HIDDEN, torch.zeros(2))))(HIDDEN)

"""Modules to build pack functions from: the usual stages of a transformer, and stages with side inputs or losses.

Shapes: B samples, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from torchslicer.errors import UserError
from torchslicer.graph.auxloss import add_aux_loss, is_collected


def _positions(hidden: torch.Tensor) -> torch.Tensor:
    """Position numbers (1, T) for hidden states or tokens (B, T, ...)."""
    return torch.arange(hidden.size(1), device=hidden.device).unsqueeze(0)


def _run_block(block: nn.Module, hidden: torch.Tensor, rotary_emb: nn.Module | None) -> Any:
    if rotary_emb is None:
        return block(hidden)
    return block(hidden, position_embeddings=rotary_emb(hidden, _positions(hidden)))


class BlockStage(nn.Module):
    """One transformer block: (B, T, D) to (B, T, D); of a block that returns a tuple or list, the first element.

    Args:
        block: The block.
        rotary_emb: If given, ``rotary_emb(hidden, position_ids)`` is handed to the block as ``position_embeddings=``.

    Example:
        >>> BlockStage(nn.Linear(4, 4))(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, block: nn.Module, rotary_emb: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.rotary_emb = rotary_emb

    def forward(self, hidden: torch.Tensor) -> Any:
        """Run the block."""
        output = _run_block(self.block, hidden, self.rotary_emb)
        return output[0] if isinstance(output, (tuple, list)) else output


class GPT2EmbedStage(nn.Module):
    """Token plus position embedding, then dropout: tokens (B, T) to (B, T, D).

    Example:
        >>> stage = GPT2EmbedStage(nn.Embedding(10, 4), nn.Embedding(8, 4), nn.Dropout(0.1))
        >>> stage(torch.zeros(2, 3, dtype=torch.long)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, wte: nn.Module, wpe: nn.Module, drop: nn.Module) -> None:
        super().__init__()
        self.wte = wte
        self.wpe = wpe
        self.drop = drop

    def forward(self, input_ids: torch.Tensor) -> Any:
        """Embed tokens and positions."""
        return self.drop(self.wte(input_ids) + self.wpe(_positions(input_ids)))


class SimpleEmbedStage(nn.Module):
    """Token embedding alone: tokens (B, T) to (B, T, D).

    Example:
        >>> SimpleEmbedStage(nn.Embedding(10, 4))(torch.zeros(2, 3, dtype=torch.long)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, input_ids: torch.Tensor) -> Any:
        """Embed tokens."""
        return self.embed(input_ids)


class CausalLMHeadStage(nn.Module):
    """Last norm and projection to the vocabulary: (B, T, D) to logits (B, V, T).

    The vocabulary comes second, as `torch.nn.CrossEntropyLoss` wants it for targets (B, T).

    Args:
        norm: The last norm, or None.
        lm_head: The projection.

    Example:
        >>> CausalLMHeadStage(None, nn.Linear(4, 10))(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 10, 3])
    """

    def __init__(self, norm: nn.Module | None, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        normed = hidden if self.norm is None else self.norm(hidden)
        logits: torch.Tensor = self.lm_head(normed)
        return logits.transpose(1, 2)


class AuxInputStage(nn.Module, ABC):
    """A stage that takes inputs of the batch beside what the stage before it makes; to be subclassed.

    ``forward(main, **aux)``: *main* comes from the stage before, *aux* by name from the batch.

    Example:
        >>> class Masked(AuxInputStage):
        ...     def forward(self, main, *, mask):
        ...         return main * mask
        >>> Masked()(torch.ones(2), mask=torch.tensor([1.0, 0.0]))
        tensor([1., 0.])
    """

    accepts_aux_inputs = True

    @abstractmethod
    def forward(self, main: Any, **aux: Any) -> Any:
        """Run the stage."""


class MoEBlockStage(nn.Module):
    """A block that returns ``(hidden, aux_loss)``: passes hidden (B, T, D) on and trains on ``weight * aux_loss`` too.

    Args:
        block: The block.
        aux_loss_weight: Factor of the auxiliary loss.
        rotary_emb: As for `BlockStage`.

    Raises:
        UserError: In ``forward``, if the block returns something else or its auxiliary loss is not a single number.
    """

    def __init__(self, block: nn.Module, aux_loss_weight: float = 0.01, rotary_emb: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.aux_loss_weight = aux_loss_weight
        self.rotary_emb = rotary_emb
        self._last_aux: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> Any:
        """Run the block and hand its auxiliary loss to whoever collects."""
        output = _run_block(self.block, hidden, self.rotary_emb)
        if not isinstance(output, (tuple, list)) or len(output) != 2:
            raise UserError(
                f"MoEBlockStage: {type(self.block).__name__} must return (hidden, aux_loss), "
                f"got {type(output).__name__}{_length_text(output)}"
            )
        main, aux = output
        self._last_aux = None
        if aux is not None:
            add_aux_loss(aux, self.aux_loss_weight)
            if not is_collected():  # else it would keep the graph of the step alive
                self._last_aux = aux * self.aux_loss_weight
        return main

    def pop_aux_loss(self) -> torch.Tensor | None:
        """Return the weighted auxiliary loss of the last ``forward`` outside a sliced model, and forget it.

        None if there is none. In a sliced model the loss is trained on without further ado.
        """
        last, self._last_aux = self._last_aux, None
        return last

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the last loss: it belongs to one step, and a tensor with a graph cannot be copied."""
        return {**self.__dict__, "_last_aux": None}


def _length_text(output: Any) -> str:
    return f" of length {len(output)}" if isinstance(output, (tuple, list)) else ""

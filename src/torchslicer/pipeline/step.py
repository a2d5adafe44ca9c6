"""Cut the batches of a step into micro-batches: what each stage is told about each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchslicer.errors import NonFiniteLossError
from torchslicer.pipeline.batch import Batch
from torchslicer.pipeline.microbatch import split_batch
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.rng import stream_key
from torchslicer.pipeline.stage import Result, Work


def make_works(batches: Sequence[Batch], options: TrainingOptions, step: int) -> list[list[Work]]:
    """Return, for each batch of a step, its micro-batches with their shares of the loss and random streams."""
    split = [split_batch(batch, options.num_microbatches, options.shared_inputs) for batch in batches]
    pieces = [piece for batch in split for piece in batch]
    shares = options.criterion.shares([piece.target for piece in pieces], [piece.size for piece in pieces])
    samples = sum(piece.size for piece in pieces)
    works: list[list[Work]] = []
    number = 0
    for batch in split:
        works.append([])
        of = f" of {len(batch)} ({{}} of {sum(piece.size for piece in batch)} samples)" if len(batch) > 1 else ""
        for index, piece in enumerate(batch):
            work = Work(
                microbatch=index,
                inputs=piece.inputs,
                target=piece.target,
                share=shares[number],
                aux_share=piece.size / samples,
                key=stream_key(options.seed, step, number),
                position=of.format(piece.size),
            )
            works[-1].append(work)
            number += 1
    return works


class LossCollector:
    """Takes the losses of a batch in, as stages report them."""

    def __init__(self) -> None:
        self._losses: dict[int, torch.Tensor] = {}
        self._aux: dict[int, list[torch.Tensor]] = {}

    def add(self, microbatch: int, result: Result) -> None:
        """Note what a stage reports."""
        if result.loss is not None:
            self._losses[microbatch] = result.loss.cpu()
        self._aux.setdefault(microbatch, []).extend(loss.cpu() for loss in result.aux_losses)

    def by_microbatch(self) -> tuple[dict[int, torch.Tensor], dict[int, list[torch.Tensor]]]:
        """Return the losses and the auxiliary ones by micro-batch."""
        return dict(self._losses), {index: losses for index, losses in self._aux.items() if losses}

    def in_order(self) -> list[torch.Tensor]:
        """Return the losses by micro-batch, each followed by its auxiliary ones."""
        found: list[torch.Tensor] = []
        for index in sorted({*self._losses, *self._aux}):
            found += [self._losses[index]] if index in self._losses else []
            found += self._aux.get(index, [])
        return found


def total_loss(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the losses of a step, in the order of micro-batches and stages, so that the sum is the same in any mode."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def check_finite(loss: torch.Tensor, step: int) -> None:
    """Raise `NonFiniteLossError` if the loss of a step is NaN or infinite."""
    if not torch.isfinite(loss):
        raise NonFiniteLossError(
            f"step {step}: the loss is {loss.item()}; no parameter was updated. Look at the inputs of this batch, or "
            "lower the learning rate, or clip gradients (max_grad_norm=)"
        )

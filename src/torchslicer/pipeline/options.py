"""How a run trains, as checked values."""

from __future__ import annotations

from dataclasses import dataclass

from torchslicer.pipeline.criterion import Criterion
from torchslicer.pipeline.optimizers import OptimizerSpec, SchedulerSpec


@dataclass(frozen=True)
class TrainingOptions:
    """How a run trains. Everything in it has been checked.

    ``accumulate`` is the number of batches in a step; ``num_microbatches`` the number of pieces of each batch.
    """

    optimizer: OptimizerSpec
    criterion: Criterion
    scheduler: SchedulerSpec | None = None
    schedule: str = "gpipe"
    num_microbatches: int = 1
    accumulate: int = 1
    max_grad_norm: float | None = None
    recompute: str = "never"
    batch_norm: str = "per_microbatch"
    mixed_precision: bool = False
    seed: int = 0
    shared_inputs: tuple[str, ...] = ()

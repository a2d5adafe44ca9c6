"""What an executor is: it turns "run this step" into work for its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from torchslicer.cluster.shipping.builder import Builder
from torchslicer.errors import RunError
from torchslicer.graph.modes import ModeGraphs
from torchslicer.pipeline.batch import Batch
from torchslicer.pipeline.criterion import Criterion
from torchslicer.pipeline.options import TrainingOptions


@dataclass(frozen=True)
class Cut:
    """A model and where it is cut: the graphs, and for each unit of each the stage that it belongs to.

    ``builder`` is what made the model, where the user has given its name instead of a model.
    """

    graphs: ModeGraphs
    stage_of: tuple[int, ...]
    evaluation_stage_of: tuple[int, ...]
    devices: tuple[str, ...]
    builder: Builder | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stage_of[-1] + 1


def no_run() -> RunError:
    """Return the error of a step outside of any run."""
    return RunError("no run is in progress any more; was the executor closed or torn down by a callback?")


@dataclass(frozen=True)
class StepResult:
    """What a step gave. ``grad_norm`` is the norm over all stages before clipping, None without clipping."""

    loss: float
    samples: int
    lr: float
    grad_norm: float | None = None


@dataclass(frozen=True)
class ForwardResult:
    """Outputs of a batch, and its loss where a criterion was given."""

    output: Any
    loss: float | None = None


Upcoming: TypeAlias = "Callable[[], Sequence[Batch] | None]"
"""Returns the batches of the next step of the epoch, None after the last; called at most once a step."""


class Executor(Protocol):
    """Runs a cut model. Calls come in this order: ``setup``, then steps and epochs, then ``teardown``.

    ``wants_upcoming`` says whether steps should be told of the batches that come after them, to send them ahead;
    ``insecure`` whether it speaks plain text with other machines; ``busy`` whether a run is in progress.
    """

    wants_upcoming: bool
    insecure: bool

    @property
    def busy(self) -> bool:
        """Whether it was set up for a run that has not been torn down."""

    def setup(self, cut: Cut, options: TrainingOptions) -> None:
        """Get ready to train."""

    def train_step(self, batches: Sequence[Batch], step: int, upcoming: Upcoming | None = None) -> StepResult:
        """Run one optimizer step on *batches* (several when gradients are accumulated)."""

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Advance schedulers that step once an epoch."""

    def teardown(self, *, failed: bool = False) -> None:
        """Release everything; unless the run *failed*, the model holds the trained weights."""

    def current_state(self, cut: Cut) -> Mapping[str, Tensor] | None:
        """Return parameters and buffers that are elsewhere while a run of *cut* lasts; None if the model has them."""

    def forward(self, cut: Cut, batch: Batch, *, criterion: Criterion | None, mixed_precision: bool) -> ForwardResult:
        """Run a batch in evaluation mode without changing any state."""

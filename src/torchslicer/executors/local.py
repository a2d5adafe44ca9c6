"""The local executor: one rank, in this process, that holds every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchslicer.executors.base import Cut, ForwardResult, StepResult, Upcoming, no_run
from torchslicer.executors.checks import check_changing_buffers
from torchslicer.graph.modes import evaluation_mode
from torchslicer.pipeline.batch import Batch
from torchslicer.pipeline.criterion import Criterion
from torchslicer.pipeline.optimizers import clip_coefficient, global_norm
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.parameters import place
from torchslicer.pipeline.rank import Rank
from torchslicer.pipeline.rng import preserved_rng, stream_key
from torchslicer.pipeline.runtime import Runtime
from torchslicer.pipeline.stage import Stage, StageOptions, Work, find_routes, move
from torchslicer.pipeline.step import LossCollector, check_finite, make_works, total_loss
from torchslicer.schedule import forward_only, fuse

EVALUATION_STREAM = -1
"""Stands for the seed of random numbers drawn outside training, so that evaluation is repeatable."""


class LocalExecutor:
    """Runs all stages in this process, on one device or several.

    Example:
        >>> import torchslicer as ts
        >>> sliced = ts.slice(
        ...     torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), n=2, executor=LocalExecutor()
        ... )
    """

    wants_upcoming = False
    insecure = False

    def __init__(self) -> None:
        self._run: _LocalRun | None = None
        self._evaluator: _Evaluator | None = None

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The stages of the run in progress."""
        return self._running().rank.runtime.stages

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""
        return self._run is not None

    def setup(self, cut: Cut, options: TrainingOptions) -> None:
        """Place the stages on their devices and make their optimizers.

        Raises:
            SliceError: Micro-batches would change the model's buffers in another order than without the cut.
        """
        if options.num_microbatches > 1:
            check_changing_buffers(cut, "the order in which micro-batches change it would depend on the cut")
        self._run = _LocalRun(cut, options)

    def train_step(
        self,
        batches: Sequence[Batch],
        step: int,
        upcoming: Upcoming | None = None,  # noqa: ARG002 - nothing is to be sent ahead
    ) -> StepResult:
        """Run one optimizer step.

        Raises:
            StageError: A stage raised; nothing was updated.
            NonFiniteLossError: The loss is not finite; nothing was updated.
        """
        return self._running().step(batches, step)

    def gradients(self, batches: Sequence[Batch], step: int) -> tuple[float, dict[str, torch.Tensor | None]]:
        """Return the loss of *batches* and every parameter's gradient, without updating anything."""
        return self._running().gradients(batches, step)

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Advance the schedulers that step once an epoch."""
        self._running().rank.advance("epoch", metrics)

    def teardown(self, *, failed: bool = False) -> None:  # noqa: ARG002 - here nothing is to be fetched
        """Let go of the run."""
        if self._run is not None:
            self._run.rank.close()
        self._run = None

    def current_state(self, cut: Cut) -> Mapping[str, torch.Tensor] | None:  # noqa: ARG002 - as the protocol has it
        """Return None: the model itself is trained."""
        return None

    def forward(self, cut: Cut, batch: Batch, *, criterion: Criterion | None, mixed_precision: bool) -> ForwardResult:
        """Run a batch in evaluation mode; no state, flag or random number of the caller changes."""
        known = self._evaluator
        if known is None or known.cut is not cut or known.mixed_precision != mixed_precision:
            self._evaluator = known = _Evaluator(cut, mixed_precision=mixed_precision)
        return known.run(batch, criterion)

    def _running(self) -> _LocalRun:
        if self._run is None:
            raise no_run()
        return self._run


class _LocalRun:
    """One training run on a rank that holds every stage."""

    def __init__(self, cut: Cut, options: TrainingOptions) -> None:
        self.options = options
        self.graph = cut.graphs.training
        devices = [torch.device(name) for name in cut.devices]
        place(self.graph, cut.stage_of, devices)
        routes = find_routes(self.graph, cut.stage_of)
        self.rank = Rank(self.graph, cut.stage_of, routes, held=range(cut.num_stages), devices=devices, options=options)

    def step(self, batches: Sequence[Batch], step: int) -> StepResult:
        loss = self._accumulate(batches, step)
        norm = self._clip()
        lr = self.rank.lr
        self.rank.step()
        return StepResult(loss, sum(batch.size for batch in batches), lr, norm)

    def gradients(self, batches: Sequence[Batch], step: int) -> tuple[float, dict[str, torch.Tensor | None]]:
        loss = self._accumulate(batches, step)
        gradients = {name: parameter.grad for name, parameter in self.graph.parameters.items()}
        self.rank.table.clear_gradients()
        return loss, gradients

    def _accumulate(self, batches: Sequence[Batch], step: int) -> float:
        """Run forward and backward of every micro-batch and return the loss of the step."""
        losses: list[torch.Tensor] = []
        for works in make_works(batches, self.options, step):
            collector = LossCollector()
            self.rank.run_batch(works, collector.add)
            losses += collector.in_order()
        total = total_loss(losses)
        try:
            check_finite(total, step)
        except BaseException:
            self.rank.table.clear_gradients()
            raise
        self.rank.finish_batches()
        return float(total)

    def _clip(self) -> float | None:
        if self.options.max_grad_norm is None:
            return None
        norm = global_norm(list(self.rank.norms().values()))
        self.rank.scale_gradients(clip_coefficient(norm, self.options.max_grad_norm))
        return float(norm)


class _Evaluator:
    """The stages of a cut in evaluation mode."""

    def __init__(self, cut: Cut, *, mixed_precision: bool) -> None:
        self.cut = cut
        self.mixed_precision = mixed_precision
        self.devices = [torch.device(name) for name in cut.devices]
        graph, stage_of = cut.graphs.evaluation, cut.evaluation_stage_of
        routes = find_routes(graph, stage_of)
        autocast = torch.bfloat16 if mixed_precision else None
        self.runtime = Runtime(
            {
                index: Stage(index, graph, stage_of, routes, options=StageOptions(self.devices[index], autocast))
                for index in range(cut.num_stages)
            }
        )
        self.actions = fuse(forward_only(cut.num_stages, 1)).ranks[0]

    def run(self, batch: Batch, criterion: Criterion | None) -> ForwardResult:
        work = Work(0, batch.inputs, batch.target, key=stream_key(EVALUATION_STREAM, 0, 0))
        graph = self.cut.graphs.evaluation
        with evaluation_mode(graph.model, *graph.modules.values()), preserved_rng(tuple(self.devices)), torch.no_grad():
            outputs: list[Any] = []
            self.runtime.run(self.actions, [work], lambda _, result: outputs.append(result.output), training=False)
            output = next((found for found in outputs if found is not None), None)
            if criterion is None:
                return ForwardResult(output)
            target = move(batch.target, self.devices[-1])
            return ForwardResult(output, float(criterion.to(self.devices[-1]).loss(output, target)))

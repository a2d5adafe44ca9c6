"""The local executor: one rank, in this process, that holds every stage."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchslicer.errors import NonFiniteLossError
from torchslicer.executors.base import Cut, ForwardResult, StepResult, TrainingOptions
from torchslicer.graph.modes import evaluation_mode
from torchslicer.pipeline.batch import Batch
from torchslicer.pipeline.batchnorm import DeferredStatistics, training_batch_norms
from torchslicer.pipeline.criterion import Criterion
from torchslicer.pipeline.microbatch import split_batch
from torchslicer.pipeline.optimizers import clip_coefficient, global_norm, gradient_norms, scale_gradients
from torchslicer.pipeline.parameters import ParameterTable, place
from torchslicer.pipeline.rng import preserved_rng, stream_key
from torchslicer.pipeline.runtime import Runtime
from torchslicer.pipeline.stage import Stage, StageOptions, Work, find_routes, move
from torchslicer.schedule import Action, forward_only, fuse, generate

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

    def __init__(self) -> None:
        self._run: _LocalRun | None = None
        self._evaluator: _Evaluator | None = None

    @property
    def stages(self) -> Mapping[int, Stage]:
        """The stages of the run in progress."""
        return self._running().runtime.stages

    def setup(self, cut: Cut, options: TrainingOptions) -> None:
        """Place the stages on their devices and make their optimizers."""
        self._run = _LocalRun(cut, options)

    def train_step(self, batches: Sequence[Batch], step: int) -> StepResult:
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
        self._running().advance("epoch", metrics)

    def teardown(self) -> None:
        """Let go of the run."""
        if self._run is not None:
            self._run.close()
        self._run = None

    def forward(self, cut: Cut, batch: Batch, *, criterion: Criterion | None, mixed_precision: bool) -> ForwardResult:
        """Run a batch in evaluation mode; no state, flag or random number of the caller changes."""
        known = self._evaluator
        if known is None or known.cut is not cut or known.mixed_precision != mixed_precision:
            self._evaluator = known = _Evaluator(cut, mixed_precision=mixed_precision)
        return known.run(batch, criterion)

    def _running(self) -> _LocalRun:
        if self._run is None:
            raise RuntimeError("the executor was not set up")
        return self._run


class _LocalRun:
    """One training run: stages, optimizers, schedulers."""

    def __init__(self, cut: Cut, options: TrainingOptions) -> None:
        self.options = options
        self.graph = cut.graphs.training
        self.devices = [torch.device(name) for name in cut.devices]
        place(self.graph, cut.stage_of, self.devices)
        self.table = ParameterTable(self.graph, cut.stage_of, self.devices)
        self.table.clear_gradients()
        routes = find_routes(self.graph, cut.stage_of)
        stages = {
            index: Stage(
                index, self.graph, cut.stage_of, routes, bind=self.table.bind, options=self._stage_options(index)
            )
            for index in range(cut.num_stages)
        }
        self.runtime = Runtime(stages, recompute=options.recompute)
        self.optimizers = self._make_optimizers(cut.num_stages)
        self.schedulers = [options.scheduler.build(o) for o in self.optimizers] if options.scheduler else []
        self._orders: dict[int, tuple[Action, ...]] = {}
        self._exit = contextlib.ExitStack()
        self.deferred = self._defer_statistics()

    def _stage_options(self, stage: int) -> StageOptions:
        return StageOptions(
            device=self.devices[stage],
            autocast=torch.bfloat16 if self.options.mixed_precision else None,
            loss=self.options.criterion.to(self.devices[stage]),
        )

    def _make_optimizers(self, num_stages: int) -> list[Optimizer]:
        made = [self.options.optimizer.build(list(self.table.owned_by(stage).items())) for stage in range(num_stages)]
        return [optimizer for optimizer in made if optimizer is not None]

    def _defer_statistics(self) -> DeferredStatistics | None:
        if self.options.batch_norm != "deferred":
            return None
        deferred = DeferredStatistics(training_batch_norms(self.graph.model))
        self._exit.enter_context(deferred.installed())
        for stage in self.runtime.stages.values():
            stage.during_recomputation = deferred.paused
        return deferred

    def close(self) -> None:
        self._exit.close()
        self.table.clear_gradients()

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch], step: int) -> StepResult:
        loss = self._accumulate(batches, step)
        norm = self._clip()
        lr = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0
        for optimizer in self.optimizers:
            optimizer.step()
        self.table.refresh_aliases()
        self.table.clear_gradients()
        self.advance("step", {})
        return StepResult(loss, sum(batch.size for batch in batches), lr, norm)

    def gradients(self, batches: Sequence[Batch], step: int) -> tuple[float, dict[str, torch.Tensor | None]]:
        loss = self._accumulate(batches, step)
        gradients = {name: parameter.grad for name, parameter in self.graph.parameters.items()}
        self.table.clear_gradients()
        return loss, gradients

    def _accumulate(self, batches: Sequence[Batch], step: int) -> float:
        """Run forward and backward of every micro-batch and return the loss of the step."""
        try:
            with preserved_rng(tuple(self.devices)):
                losses = [self._run_batch(works) for works in self._works(batches, step)]
            loss = _total(losses)
            _check_finite(loss, step)
        except BaseException:
            self.table.clear_gradients()
            raise
        self.table.combine_gradients()
        if self.deferred is not None:
            self.deferred.apply()
        return float(loss)

    def _works(self, batches: Sequence[Batch], step: int) -> list[list[Work]]:
        """Cut the batches of a step into micro-batches, each with its share of the loss and its random numbers."""
        split = [split_batch(batch, self.options.num_microbatches, self.options.shared_inputs) for batch in batches]
        pieces = [piece for batch in split for piece in batch]
        shares = self.options.criterion.shares([p.target for p in pieces], [p.size for p in pieces])
        samples = sum(piece.size for piece in pieces)
        works: list[list[Work]] = []
        number = 0
        for batch in split:
            works.append([])
            for index, piece in enumerate(batch):
                key = stream_key(self.options.seed, step, number)
                aux_share = piece.size / samples
                position = (
                    f" of {len(batch)} ({piece.size} of {sum(p.size for p in batch)} samples)" if len(batch) > 1 else ""
                )
                works[-1].append(Work(index, piece.inputs, piece.target, shares[number], aux_share, key, position))
                number += 1
        return works

    def _run_batch(self, works: list[Work]) -> list[torch.Tensor]:
        outcome = self.runtime.run(self._order(len(works)), works)
        losses = []
        for work in works:
            losses.append(outcome.losses[work.microbatch].detach().cpu())
            losses += [aux.cpu() for aux in outcome.aux_losses.get(work.microbatch, [])]
        return losses

    def _order(self, num_microbatches: int) -> tuple[Action, ...]:
        if num_microbatches not in self._orders:
            schedule = generate(self.options.schedule, len(self.runtime.stages), num_microbatches)
            self._orders[num_microbatches] = fuse(schedule).ranks[0]
        return self._orders[num_microbatches]

    def _clip(self) -> float | None:
        if self.options.max_grad_norm is None:
            return None
        gradients = [parameter.grad for parameter in self.graph.parameters.values() if parameter.grad is not None]
        norm = global_norm(gradient_norms(gradients))
        scale_gradients(gradients, clip_coefficient(norm, self.options.max_grad_norm))
        return float(norm)

    def advance(self, interval: str, metrics: Mapping[str, float]) -> None:
        """Advance the schedulers that step once an *interval*."""
        spec = self.options.scheduler
        if spec is not None and spec.interval == interval:
            for scheduler in self.schedulers:
                spec.step(scheduler, metrics)


def _check_finite(loss: torch.Tensor, step: int) -> None:
    if not torch.isfinite(loss):
        raise NonFiniteLossError(
            f"step {step}: the loss is {loss.item()}; nothing was updated. Look at the inputs of this batch, or lower "
            "the learning rate, or clip gradients (max_grad_norm=)"
        )


def _total(losses: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    flat = [loss for batch in losses for loss in batch]
    total = flat[0]
    for loss in flat[1:]:
        total = total + loss
    return total


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
        model = self.cut.graphs.evaluation.model
        with evaluation_mode(model), preserved_rng(tuple(self.devices)), torch.no_grad():
            output: Any = self.runtime.run(self.actions, [work], training=False).outputs[0]
            if criterion is None:
                return ForwardResult(output)
            target = move(batch.target, self.devices[-1])
            return ForwardResult(output, float(criterion.to(self.devices[-1]).loss(output, target)))

"""One rank: the stages it holds, their optimizers, and what it does in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch.optim import Optimizer

from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.batchnorm import DeferredStatistics, training_batch_norms
from torchslicer.pipeline.exchange import Exchange
from torchslicer.pipeline.optimizers import gradient_norms, scale_gradients
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.parameters import ParameterTable
from torchslicer.pipeline.rng import preserved_rng
from torchslicer.pipeline.runtime import Report, Runtime
from torchslicer.pipeline.stage import Route, Stage, StageOptions, Work
from torchslicer.schedule import Action, fuse, generate


class Rank:
    """The stages of one rank while a run lasts.

    Args:
        graph: The graph that is trained.
        stage_of: Stage of each unit.
        routes: All values that cross cuts.
        held: The stages that this rank holds.
        devices: Device of every stage.
        options: How to train.
        exchange: How values reach stages of other ranks; None when this rank holds them all.
    """

    def __init__(
        self,
        graph: ModelGraph,
        stage_of: Sequence[int],
        routes: Sequence[Route],
        *,
        held: Sequence[int],
        devices: Sequence[torch.device],
        options: TrainingOptions,
        exchange: Exchange | None = None,
    ) -> None:
        self.graph = graph
        self.options = options
        self.devices = tuple(devices)
        self.num_stages = stage_of[-1] + 1
        self.table = ParameterTable(graph, stage_of, devices, held)
        self.table.clear_gradients()
        stages = {
            index: Stage(index, graph, stage_of, routes, bind=self.table.bind, options=self._stage_options(index))
            for index in held
        }
        self.runtime = Runtime(stages, exchange=exchange, recompute=options.recompute)
        self.optimizers = self._make_optimizers()
        self.schedulers = [options.scheduler.build(o) for o in self.optimizers] if options.scheduler else []
        self._orders: dict[int, tuple[Action, ...]] = {}
        self._exit = contextlib.ExitStack()
        self._deferred = self._defer_statistics()

    def _stage_options(self, stage: int) -> StageOptions:
        return StageOptions(
            device=self.devices[stage],
            autocast=torch.bfloat16 if self.options.mixed_precision else None,
            loss=self.options.criterion.to(self.devices[stage]),
        )

    def _make_optimizers(self) -> list[Optimizer]:
        named = [list(self.table.updated_by(stage).items()) for stage in self.runtime_stages]
        made = [self.options.optimizer.build(parameters) for parameters in named]
        return [optimizer for optimizer in made if optimizer is not None]

    @property
    def runtime_stages(self) -> tuple[int, ...]:
        """Numbers of the stages that this rank holds."""
        return tuple(self.runtime.stages)

    def _defer_statistics(self) -> DeferredStatistics | None:
        if self.options.batch_norm != "deferred":
            return None
        deferred = DeferredStatistics(training_batch_norms(self.graph.model))
        self._exit.enter_context(deferred.installed())
        for stage in self.runtime.stages.values():
            stage.during_recomputation = deferred.paused
        return deferred

    def close(self) -> None:
        """Give the modules back as they were; forget gradients."""
        self._exit.close()
        self.table.clear_gradients()

    def run_batch(self, works: Sequence[Work], report: Report) -> None:
        """Run forward and backward of a batch's micro-batches; gradients add up until `step`.

        Raises:
            StageError: A stage raised; all gradients were forgotten.
        """
        try:
            with preserved_rng(self.devices):
                self.runtime.run(self._order(len(works)), works, report)
        except BaseException:
            self.table.clear_gradients()
            raise

    def _order(self, num_microbatches: int) -> tuple[Action, ...]:
        if num_microbatches not in self._orders:
            schedule = generate(self.options.schedule, self.num_stages, num_microbatches)
            if len(self.runtime.stages) == self.num_stages:
                schedule = fuse(schedule)
            held = set(self.runtime.stages)
            self._orders[num_microbatches] = tuple(
                action for actions in schedule.ranks for action in actions if action.stage in held
            )
        return self._orders[num_microbatches]

    def finish_batches(self, foreign: Mapping[str, Mapping[int, torch.Tensor | None]] | None = None) -> None:
        """Call it when all batches of a step are through: puts together what was collected over them.

        *foreign* holds the gradients of tied parameters' uses in other ranks.
        """
        self.table.combine_gradients(foreign)
        if self._deferred is not None:
            self._deferred.apply()

    def norms(self) -> dict[str, torch.Tensor]:
        """Return the gradient norm of every parameter that a stage of this rank owns."""
        owned = self.table.owned()
        gradients = {name: parameter.grad for name, parameter in owned.items() if parameter.grad is not None}
        return dict(zip(gradients, gradient_norms(list(gradients.values())), strict=True))

    def scale_gradients(self, coefficient: torch.Tensor) -> None:
        """Multiply all gradients by *coefficient*."""
        gradients = [parameter.grad for parameter in self.table.all_parameters() if parameter.grad is not None]
        scale_gradients(gradients, coefficient)

    def step(self) -> None:
        """Update the parameters, forget the gradients, and advance schedulers that step once a step."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.table.refresh_aliases()
        self.table.clear_gradients()
        self.advance("step", {})

    def advance(self, interval: str, metrics: Mapping[str, float]) -> None:
        """Advance the schedulers that step once an *interval*."""
        spec = self.options.scheduler
        if spec is not None and spec.interval == interval:
            for scheduler in self.schedulers:
                spec.step(scheduler, metrics)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group; 0 where nothing is trained."""
        return float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0

"""One loop for every schedule: what is in flight, and what is left after a failure."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.models import MLP, mlp4
from torchslicer.errors import StageError
from torchslicer.graph.fx import trace_fx
from torchslicer.pipeline.runtime import Runtime
from torchslicer.pipeline.stage import Stage, StageOptions, Work, find_routes
from torchslicer.schedule import Action, ActionKind, fuse, generate

SGD = {"name": "SGD", "params": {"lr": 0.1}}


class Looks(ts.TrainingCallback):
    """Notes what was in flight at most, by stage."""

    def __init__(self) -> None:
        self.peaks: list[list[int]] = []

    def attach(self, sliced: ts.SlicedModel) -> Looks:
        self.sliced = sliced
        return self

    def on_step_end(self, step: int, metrics: Any) -> None:
        self.peaks.append([stage.peak_in_flight for stage in self.sliced.executor.stages.values()])  # type: ignore[attr-defined]


def table(schedule: str, stages: int, m: int) -> list[int]:
    """PAPERS section 0: GPipe keeps m micro-batches at every rank, 1F1B min(m, p - r) at rank r."""
    return [m if schedule == "gpipe" else min(m, stages - rank) for rank in range(stages)]


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_in_flight_are_those_of_the_table(schedule: str, m: int) -> None:
    sliced = ts.slice(mlp4(), n=4)
    looks = Looks().attach(sliced)
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": m, "callbacks": [looks]}
    sliced.train(MLP.batches(2, size=16), SGD, nn.CrossEntropyLoss(), epochs=1, run_dir=False, **options)
    assert looks.peaks == [table(schedule, 4, m)] * 2


class SumLoss:
    """The sum of the output, weighted."""

    def weighted_loss(self, output: Any, target: Any, share: float) -> Tensor:
        return output.sum() * share


def runtime(model: nn.Module, stages: int, **options: Any) -> Runtime:
    """Return a runtime with a stage for every unit."""
    graph = trace_fx(model, ["input"])
    stage_of = range(stages)
    routes = find_routes(graph, stage_of)
    settings = StageOptions(loss=SumLoss())
    return Runtime({i: Stage(i, graph, stage_of, routes, options=settings) for i in stage_of}, **options)


class Breaks(nn.Module):
    """Fails on the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e30:
            return x
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("third call")
        return x * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_after_a_failure_nothing_is_in_flight_and_the_next_run_is_right(schedule: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Breaks(), nn.Linear(2, 2))
    made = runtime(model, 3)
    actions = [a for r in fuse(generate(schedule, 3, 4)).ranks for a in r if a.kind in (ActionKind.F, ActionKind.B)]
    works = [Work(i, {"input": torch.full((1, 2), float(i))}) for i in range(4)]
    with pytest.raises(StageError, match=r"stage 1, forward of micro-batch 2.*ArithmeticError: third call"):
        made.run(actions, works, lambda *_: None)
    assert all(not stage._live for stage in made.stages.values())
    assert not made.exchange._packets  # type: ignore[attr-defined]
    model.zero_grad()
    made.run(actions, works, lambda *_: None)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for work in works:
        model(**work.inputs).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_evaluation_keeps_nothing() -> None:
    made = runtime(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 2)
    outputs: list[Any] = []
    forward = [Action(ActionKind.F, stage, 0) for stage in (0, 1)]
    made.run(forward, [Work(0, {"input": torch.ones(1, 2)})], lambda _, r: outputs.append(r), training=False)
    assert all(stage.peak_in_flight == 0 for stage in made.stages.values())
    assert not outputs[-1].loss.requires_grad


@pytest.mark.parametrize(("recompute", "calls"), [("never", 3), ("except_last", 5), ("always", 6)])
def test_recomputation_runs_what_it_says(recompute: str, calls: int) -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if bool(x.isnan().any()):  # keeps it whole
                return x
            Counts.calls += 1
            return x * 2

    made = runtime(nn.Sequential(nn.Linear(2, 2), Counts()), 2, recompute=recompute)
    Counts.calls = 0
    works = [Work(i, {"input": torch.ones(1, 2)}) for i in range(3)]
    made.run([a for r in fuse(generate("gpipe", 2, 3)).ranks for a in r], works, lambda *_: None)
    assert Counts.calls == calls

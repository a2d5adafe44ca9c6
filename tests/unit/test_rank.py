"""One rank: its stages, their optimizers, and a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.nets_values import TiedTwice
from torchslicer.errors import StageError
from torchslicer.graph.fx import trace_fx
from torchslicer.pipeline.criterion import build_criterion
from torchslicer.pipeline.optimizers import build_optimizer_spec
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.rank import Rank
from torchslicer.pipeline.stage import Work, find_routes

CPU = torch.device("cpu")


def make(model: nn.Module, stage_of: Sequence[int], name: str = "x", **options: Any) -> Rank:
    """Return a rank that holds every stage."""
    graph = trace_fx(model, [name])
    count = stage_of[-1] + 1
    settings = TrainingOptions(
        optimizer=build_optimizer_spec({"name": "SGD", "params": {"lr": 0.5}}),
        criterion=build_criterion("cross_entropy"),
        **options,
    )
    routes = find_routes(graph, stage_of)
    return Rank(graph, stage_of, routes, held=range(count), devices=[CPU] * count, options=settings)


def works(count: int, name: str = "x") -> list[Work]:
    return [Work(i, {name: torch.randn(4, 16)}, torch.randint(4, (4,)), share=1 / count, key=i) for i in range(count)]


def test_a_tied_parameter_is_in_one_optimizer() -> None:
    rank = make(TiedTwice(), (0, 1, 2, 2))
    held = [id(p) for optimizer in rank.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == 7
    assert len(rank.optimizers) == 3


def test_a_step_updates_by_the_gradient_and_forgets_it() -> None:
    rank = make(TiedTwice(), (0, 1, 2, 2), num_microbatches=2)
    rank.run_batch(works(2), lambda *_: None)
    rank.finish_batches()
    model = rank.graph.model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == set(before)
    norms = rank.norms()
    assert {n: norms[n].item() for n in norms} == pytest.approx({n: g.norm().item() for n, g in gradients.items()})
    rank.step()
    assert all(torch.equal(p, before[n] - 0.5 * gradients[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert rank.lr == 0.5


def test_the_callers_random_state_is_preserved() -> None:
    rank = make(nn.Sequential(nn.Linear(16, 4), nn.Dropout(), nn.Linear(4, 4)), (0, 0, 1), "input")
    batch = works(1, "input")
    state = torch.get_rng_state()
    rank.run_batch(batch, lambda *_: None)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failure_forgets_gradients_of_all_stages() -> None:
    rank = make(nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4)), (0, 1), "input", schedule="1f1b", num_microbatches=2)
    good = works(2, "input")
    good[1] = Work(1, {"input": torch.randn(4, 3)}, good[1].target)
    with pytest.raises(StageError, match="stage 0, forward of micro-batch 1"):
        rank.run_batch(good, lambda *_: None)
    assert all(p.grad is None for p in rank.graph.model.parameters())


def test_deferred_statistics_are_taken_down_when_it_is_closed() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    rank = make(model, (0, 0, 1), "input", batch_norm="deferred")
    assert model[1]._forward_hooks
    rank.run_batch(works(1, "input"), lambda *_: None)
    assert model[1].num_batches_tracked == 0
    rank.finish_batches()
    assert model[1].num_batches_tracked == 1
    rank.close()
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks
    assert model[1].track_running_stats


def test_a_smaller_batch_has_an_order_of_its_own() -> None:
    rank = make(nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4)), (0, 1), "input", num_microbatches=4)
    seen: list[int] = []
    for count in (4, 2, 1):
        rank.run_batch(works(count, "input"), lambda microbatch, _: seen.append(microbatch))
    assert [seen.count(i) for i in range(4)] == [6, 4, 2, 2]

"""Deferred BatchNorm: the statistics of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from torchslicer.pipeline.batchnorm import DeferredStatistics, training_batch_norms


def deferred(model: nn.Module, pieces: list[Tensor]) -> None:
    statistics = DeferredStatistics(training_batch_norms(model))
    with statistics.installed():
        for piece in pieces:
            model(piece)
        statistics.apply()


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize("sizes", [(8,), (4, 4), (5, 2, 1), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_statistics_equal_those_of_the_whole_batch(momentum: float | None, sizes: tuple[int, ...], kind: str) -> None:
    x = torch.randn(8, 3, 4, 4) * torch.tensor([0.1, 1.0, 10.0]).view(1, 3, 1, 1) + 5
    model: nn.Module = nn.BatchNorm2d(3, momentum=momentum)
    if kind == "1d":
        x, model = x.flatten(2), nn.BatchNorm1d(3, momentum=momentum)
    whole = copy.deepcopy(model)
    for _ in range(3):
        whole(x)
        deferred(model, list(x.split(sizes)))
    assert torch.allclose(model.running_mean, whole.running_mean, rtol=1e-6, atol=0)  # type: ignore[arg-type]
    assert torch.allclose(model.running_var, whole.running_var, rtol=1e-5, atol=0)  # type: ignore[arg-type]
    assert int(model.num_batches_tracked) == 3  # type: ignore[arg-type]


def test_a_mean_far_from_zero_does_not_drown_the_variance() -> None:
    """Squares were added up and subtracted: with a mean of 10000 the variance came out as 0, 512 or below zero."""
    x = torch.randn(64, 4) + 1e4
    model, whole = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    deferred(model, list(x.split(16)))
    whole(x)
    assert torch.allclose(model.running_var, whole.running_var, rtol=1e-4)  # type: ignore[arg-type]


def test_an_input_given_by_keyword() -> None:
    """IndexError: tuple index out of range."""
    model = nn.BatchNorm1d(3)
    statistics = DeferredStatistics(training_batch_norms(model))
    with statistics.installed():
        model(input=torch.full((4, 3), 10.0))
        statistics.apply()
    assert model.running_mean is not None
    assert torch.allclose(model.running_mean, torch.ones(3))


def test_recomputation_is_not_counted_and_evaluation_neither() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    statistics = DeferredStatistics(training_batch_norms(model))
    with statistics.installed():
        with statistics.paused():
            model(torch.randn(4, 3) + 100)
        model.eval()
        model(torch.randn(4, 3) + 100)
        statistics.apply()
    assert torch.equal(model[0].running_mean, torch.zeros(3))


def test_modules_are_given_back_also_after_an_error() -> None:
    model = nn.BatchNorm1d(3)
    statistics = DeferredStatistics(training_batch_norms(model))
    with pytest.raises(ValueError, match="Expected more than 1 value"), statistics.installed():
        model(torch.randn(1, 3))
    assert model.track_running_stats
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_only_modules_that_would_update_are_named() -> None:
    model = nn.ModuleDict(
        {
            "on": nn.BatchNorm1d(2),
            "off": nn.BatchNorm1d(2, track_running_stats=False),
            "frozen": nn.BatchNorm1d(2).eval(),
        }
    )
    assert list(training_batch_norms(model)) == ["on"]

"""Metrics of an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchslicer.errors import ConfigError
from torchslicer.metrics import Totals, accuracy, resolve_metrics
from torchslicer.pipeline.criterion import build_criterion


class Seen:
    """A metric with state, like those of torchmetrics."""

    def __init__(self) -> None:
        self.count = 99

    def update(self, output: Any, target: Any) -> None:
        self.count += len(target)

    def compute(self) -> Tensor:
        return torch.tensor(float(self.count))

    def reset(self) -> None:
        self.count = 0


def test_accuracy_of_classes_and_of_positions() -> None:
    scores = torch.eye(4)
    assert accuracy(scores, torch.tensor([0, 1, 2, 0])) == 0.75
    assert accuracy(scores.unsqueeze(0).expand(2, 4, 4), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]])) == 0.625


def test_functions_are_averaged_over_samples_and_state_is_kept_over_batches() -> None:
    totals = Totals(resolve_metrics({"right": accuracy, "mean": lambda o, t: o.mean(), "seen": Seen()}))
    totals.add(torch.tensor([[0.0, 1.0]] * 3), torch.tensor([1, 1, 1]), 3)
    totals.add(torch.tensor([[0.0, 3.0]]), torch.tensor([0]), 1)
    assert totals.compute() == {"right": 0.75, "mean": pytest.approx((0.5 * 3 + 1.5) / 4), "seen": 4.0}


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_the_loss_is_that_of_all_batches_at_once(criterion: nn.Module) -> None:
    output, target = torch.randn(10, 3), torch.arange(10) % 3
    built = build_criterion(criterion)
    totals = Totals({})
    for part in (slice(0, 6), slice(6, 9), slice(9, 10)):
        loss = float(criterion(output[part], target[part]))
        totals.add(output[part], target[part], len(target[part]))
        totals.add_loss(loss, built, target[part], len(target[part]))
    assert totals.compute() == {"loss": pytest.approx(float(criterion(output, target)), rel=1e-6)}


def test_a_batch_without_any_counted_target_weighs_nothing() -> None:
    built = build_criterion(nn.CrossEntropyLoss(ignore_index=0))
    totals = Totals({})
    totals.add_loss(float("nan"), built, torch.zeros(3).long(), 3)
    totals.add_loss(2.0, built, torch.ones(3).long(), 3)
    assert totals.compute() == {"loss": 2.0}


@pytest.mark.parametrize("spec", ["accuracy", ["accuracy"], ("accuracy",), {"accuracy": accuracy}])
def test_names_and_functions(spec: Any) -> None:
    assert resolve_metrics(spec) == {"accuracy": accuracy}
    assert resolve_metrics(None) == {}


@pytest.mark.parametrize(
    ("spec", "says"),
    [(["acuracy"], "did you mean 'accuracy'"), ({"x": 3}, "must be a function"), ({"x": Seen}, "class")],
)
def test_what_is_no_metric_is_refused(spec: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_metrics(spec)

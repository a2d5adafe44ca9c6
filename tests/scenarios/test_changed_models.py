"""A model that is changed after it was sliced: the cut follows, or says why it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchslicer as ts

BATCH = (torch.arange(64.0).reshape(8, 8) / 64, torch.arange(8) % 3)


class Scaled(nn.Module):
    """Reads a plain attribute in forward, which a trace turns into a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * self.factor)


def loss_of(model: nn.Module) -> float:
    return float(functional.cross_entropy(model(BATCH[0]), BATCH[1]).detach())


def test_a_changed_attribute_is_seen() -> None:
    model = Scaled()
    sliced = ts.slice(model, n=2)
    assert sliced.gradients(BATCH, "cross_entropy")[0] == loss_of(model)
    model.factor = 5.0
    assert sliced.gradients(BATCH, "cross_entropy")[0] == loss_of(model)


def test_a_replaced_module_is_seen() -> None:
    model = Scaled()
    sliced = ts.slice(model, n=2)
    sliced.gradients(BATCH, "cross_entropy")
    model.last = nn.Linear(8, 3)
    loss, gradients = sliced.gradients(BATCH, "cross_entropy")
    assert loss == loss_of(model)
    assert gradients["last.weight"] is not None


def test_changed_training_flags_are_seen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    sliced = ts.slice(model, n=2)
    sliced.gradients(BATCH, "cross_entropy")
    before = model[1].running_mean.clone()
    model[1].eval()
    sliced.gradients(BATCH, "cross_entropy")
    assert torch.equal(model[1].running_mean, before)


class Wrapped(nn.Module):
    """A stage that a pack function makes, with a dropout layer that the model itself does not have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.inner(x))


def test_modules_that_a_pack_function_makes_are_evaluated_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    made = [Wrapped(model[0]), model[1]]
    sliced = ts.slice(model, n=2, pack=lambda _: made)
    assert torch.equal(sliced.predict([BATCH[0]]), model(BATCH[0]).detach())
    assert made[0].drop.training


def test_an_attribute_that_changes_during_training_is_refused() -> None:
    class Change(ts.TrainingCallback):
        def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
            model.factor = 3.0

    model = Scaled()
    sliced = ts.slice(model, n=2)
    with pytest.raises(ts.SliceError, match="during training"):
        sliced.train([BATCH], "sgd", "cross_entropy", epochs=2, callbacks=[Change()], run_dir=False)


def test_a_module_kept_whole_may_change_its_own_attributes() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) if bool(x.sum() > -1e9) else x

    model = nn.Sequential(nn.Linear(8, 8), Counting(8, 8), nn.Linear(8, 3))
    ts.slice(model, n=3).train([BATCH], "sgd", "cross_entropy", epochs=3, run_dir=False)
    assert model[1].calls == 3

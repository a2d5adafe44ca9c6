"""From a model and a request to a verified cut."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.models import mlp4
from tests.support.nets_values import Net
from torchslicer.cutting import CutRequest, Cutter, on_device_of, unwrapped
from torchslicer.errors import ConfigError, DataError, SliceError, TraceError, VerificationError


def cutter(model: nn.Module, n: int | None = 2, example: Any = None, **request: Any) -> Cutter:
    return Cutter(model, CutRequest(num_stages=n, **request), example)


class Optional(Net):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.d(h if bias is None else self.b(h) + bias)


def test_a_cut_is_made_without_data_and_looked_at_once() -> None:
    made = cutter(mlp4(), 3)
    assert (made.cut.num_stages, made.checked) == (3, False)
    made.look_at({"input": torch.randn(4, 16)})
    cut = made.cut
    assert made.checked
    made.look_at({"input": torch.randn(4, 16)})
    assert made.cut is cut


def test_other_inputs_make_another_cut() -> None:
    made = cutter(Optional())
    names = [unit.name for unit in made.graphs.training.units]
    made.look_at({"x": torch.randn(4, 16), "bias": torch.randn(16)})
    assert "b" not in names
    assert "b" in [unit.name for unit in made.graphs.training.units]


def test_changed_flags_make_another_cut() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.Dropout(), nn.Linear(4, 4))
    made = cutter(model)
    before = made.cut
    model.eval()
    made.look_at({"input": torch.randn(4, 16)})
    assert made.cut is not before


def test_explicit_cuts_are_kept_when_the_model_is_looked_at() -> None:
    made = cutter(mlp4(), None, cuts=("6",))
    made.look_at({"input": torch.randn(4, 16)})
    assert made.plan.unit_starts == (0, 6)
    assert made.strategy_name == "cuts"


def test_verification_can_be_switched_off() -> None:
    class Lies(Net):
        def forward(self, x: Tensor) -> Tensor:
            shift = 0.0 if type(x) is Tensor else 1.0
            return self.d(self.a(x)) + shift

    with pytest.raises(VerificationError, match="output 0 of the graph"):
        cutter(Lies(), example=torch.randn(4, 16))
    assert cutter(Lies(), example=torch.randn(4, 16), verify=False).cut.num_stages == 2


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = mlp4()
    with pytest.raises(SliceError, match="has no values"):
        ts.slice(model, n=2)


def test_time_is_measured_where_there_is_an_example() -> None:
    assert cutter(mlp4(), 2, torch.randn(4, 16), strategy="time").measured is not None
    assert cutter(mlp4(), 2, torch.randn(4, 16), strategy="parameters").measured is None


def test_the_time_of_the_loss_counts_for_the_last_stage() -> None:
    def slow(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.05)
        return (output - target).square().mean()

    model, example = mlp4(), (torch.randn(4, 16), torch.randn(4, 4))
    plan = ts.slice(model, n=2, strategy="time", example=example, criterion=slow).plan
    assert (plan.stages[-1].first_unit, plan.stages[-1].last_unit) == (len(model) - 1, len(model) - 1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_time_of_the_loss_needs_an_example_with_a_target() -> None:
    with pytest.raises(ConfigError, match=r"needs example=\(inputs, target\)"):
        ts.slice(mlp4(), n=2, strategy="time", criterion="mse")
    with pytest.raises(DataError, match="no target"):
        ts.slice(mlp4(), n=2, strategy="time", criterion="mse", example=torch.randn(4, 16))


def test_an_untraceable_model_lists_what_was_tried() -> None:
    class Branches(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.a(x)) if bool(x.sum() > 0) else self.d(self.b(x))

    with pytest.raises(TraceError) as caught:
        cutter(Branches())
    for part in ("cannot be cut into 2 stages", "torch.fx: ", "torch.export: needs example inputs", "pack=lambda"):
        assert part in str(caught.value)
    assert cutter(Branches(), 1).graphs.training.source == "whole"


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(SliceError, match=r"'0\.weight' has no shape yet"):
        cutter(nn.Sequential(nn.LazyLinear(4), nn.ReLU()))


def test_devices_are_checked() -> None:
    with pytest.raises(ConfigError, match="'warp:0' is no device"):
        cutter(mlp4(), devices=("warp:0",))
    made = cutter(mlp4(), devices=("cpu", "cpu"))
    assert made.cut.devices == ("cpu", "cpu")


def test_wrappers_are_taken_off() -> None:
    model = mlp4()
    assert unwrapped(model) is model
    assert unwrapped(nn.DataParallel(model)) is model
    assert unwrapped(torch.compile(nn.DataParallel(model), backend="eager")) is model  # type: ignore[arg-type]


def test_inputs_go_where_the_model_is() -> None:
    x = torch.ones(2)
    assert on_device_of(nn.ReLU(), {"x": x, "flag": True})["x"] is x

"""Graphs from the user's own list of stages."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from torchslicer.errors import SliceError
from torchslicer.graph.pack import packed_inputs, trace_pack


class Gate(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.linear(x) * mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x) * mask))


def pack(model: Model) -> list[nn.Module]:
    return [Gate(model.first), nn.ReLU(), model.second]


def test_stages_are_a_chain_of_units_under_the_models_own_names() -> None:
    graph = trace_pack(Model(), pack)  # type: ignore[arg-type]
    assert [unit.name for unit in graph.units] == ["stage0.Gate", "stage1.ReLU", "stage2.Linear"]
    assert graph.units[0].parameters == ("first.weight", "first.bias")
    assert [entry.name for entry in graph.inputs] == ["x", "mask"]
    assert graph.source == "pack"


def test_named_inputs_go_to_the_stages_that_take_them() -> None:
    model = Model()
    x, mask = torch.randn(5, 4), torch.rand(5, 4)
    found = ts.slice(model, n=3, pack=pack).predict([{"x": x, "mask": mask}])
    assert torch.equal(found, model.eval()(x, mask))


def test_inputs_before_and_after_a_batch_is_known() -> None:
    stages = pack(Model())
    assert packed_inputs(stages, None) == ("x", "mask")
    assert packed_inputs(stages, ["mask", "x", "unused"]) == ("x", "mask")
    assert packed_inputs([nn.ReLU()], ["tokens"]) == ("tokens",)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "got NoneType"),
        ([], "must return a list of modules, got list"),
        ([nn.ReLU(), torch.relu], "item 1 is a builtin_function_or_method"),
    ],
)
def test_what_is_no_list_of_modules_is_refused(made: Any, says: str) -> None:
    with pytest.raises(SliceError, match=says):
        trace_pack(Model(), lambda model: made)


def test_a_copied_parameter_is_refused_by_name() -> None:
    """The model would not be trained."""
    with pytest.raises(SliceError, match=r"packed stage 1 \(Linear\) has the parameter 'weight', which is not one of"):
        trace_pack(Model(), lambda model: [model.first, nn.Linear(4, 2)])  # type: ignore[list-item]

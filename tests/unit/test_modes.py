"""A model in training and in evaluation."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.nets_forward import AuxHead
from tests.support.nets_values import Net
from torchslicer.errors import SliceError
from torchslicer.graph.fx import trace_fx
from torchslicer.graph.modes import ModeGraphs, evaluation_mode, settings_of, stages_of_evaluation, trace_modes


def modes(model: nn.Module) -> ModeGraphs:
    return trace_modes(model, lambda: trace_fx(model, ["x"]))


def modes_of_chain(model: nn.Module) -> ModeGraphs:
    return trace_modes(model, lambda: trace_fx(model, ["input"]))


def test_flags_come_back_one_by_one_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.ReLU()))
    model[1][0].eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(KeyError), evaluation_mode(model):
        {}[any(module.training for module in model.modules())]
    assert [module.training for module in model.modules()] == before == [True, True, True, False, True]


def test_the_graphs_differ_where_the_model_asks_for_its_mode() -> None:
    graphs = modes(AuxHead())
    names = [[unit.name for unit in graph.units] for graph in (graphs.training, graphs.evaluation)]
    assert "aux" in names[0]
    assert "aux" not in names[1]
    assert graphs.settings == settings_of(graphs.training)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: setattr(model, "rate", 0.25),
        lambda model: setattr(model, "0", nn.Linear(2, 2)),
        lambda model: model.append(nn.ReLU()),
    ],
)
def test_whatever_a_trace_takes_for_granted_is_in_the_settings(change: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model.rate = 0.5
    graphs = modes_of_chain(model)
    assert graphs.is_current()
    change(model)
    assert not graphs.is_current()


def test_modules_that_are_called_whole_may_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    graphs = modes_of_chain(model)
    model[1].p = 0.25
    model[1].eval()
    assert graphs.is_current()


def test_units_run_where_the_training_graph_has_their_parameters() -> None:
    graphs = modes(AuxHead())
    home = tuple(range(len(graphs.training.units)))
    stages = stages_of_evaluation(graphs, home)
    where = {unit.name: home[unit.index] for unit in graphs.training.units}
    assert [where[unit.name] for unit in graphs.evaluation.units] == list(stages)


def test_an_aux_head_evaluates_as_the_model_does_at_every_cut() -> None:
    model = AuxHead()
    x = torch.randn(6, 16)
    expected = model.eval()(x)
    model.train()
    for n in range(1, len(ts.slice(model, n=1).graph.units) + 1):
        assert torch.equal(ts.slice(model, n=n).predict([x]), expected)


def test_modules_in_another_order_in_evaluation_are_refused_where_a_cut_lies_between() -> None:
    class Swaps(Net):
        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.a, self.b) if self.training else (self.b, self.a)
            return self.d(second(first(x)))

    graphs = modes(Swaps())
    assert stages_of_evaluation(graphs, (0, 0, 1)) == (0, 0, 1)
    with pytest.raises(SliceError, match="in evaluation mode 'a' runs after later stages"):
        stages_of_evaluation(graphs, (0, 1, 1))

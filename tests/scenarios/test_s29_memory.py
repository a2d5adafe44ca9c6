"""SCENARIOS section 5: memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.driver import sliced_train
from tests.support.models import MLP, mlp4
from tests.support.oracle import ADAM, SGD


def live_tensors() -> int:
    """Return how many tensors the collector knows."""
    gc.collect()
    return sum(1 for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter))


class Counts(ts.TrainingCallback):
    """Counts live tensors after some steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.counts: dict[int, int] = {}

    def on_step_end(self, step: int, metrics: Any) -> None:
        """Count at steps 10, 30 and 60."""
        self.steps += 1
        if self.steps in (10, 30, 60):
            self.counts[self.steps] = live_tensors()


@pytest.mark.parametrize(
    "options", [{}, {"recompute": "always"}, {"schedule": "1f1b"}, {"max_grad_norm": 1.0}], ids=str
)
def test_s29_live_tensors_do_not_grow(options: dict[str, Any]) -> None:
    """Activations and outputs were kept: the number of live tensors is the same after 10, 30 and 60 steps."""
    counts = Counts()
    sliced_train(
        mlp4(), MLP.batches(60), ADAM, nn.CrossEntropyLoss(), n=4, n_micro_batches=4, callbacks=[counts], **options
    )
    # The recorder of the tests and the loader keep the same things at every step.
    assert counts.counts[30] == counts.counts[10]
    assert counts.counts[60] == counts.counts[10]


class Probe(nn.Module):
    """Hands its input on and keeps a weak reference to what it made."""

    made: list[weakref.ref[Tensor]]

    def __init__(self, made: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Tensor:
        out = x * 2
        self.made.append(weakref.ref(out))
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        return Probe(self.made)


def test_s29_no_graph_is_alive_after_a_step() -> None:
    """Nothing that a step computed outlives it."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Look(ts.TrainingCallback):
        def on_step_end(self, step: int, metrics: Any) -> None:
            gc.collect()
            alive.append(sum(ref() is not None for ref in made))

    model = nn.Sequential(nn.Linear(16, 16), Probe(made), nn.Linear(16, 16), Probe(made), nn.Linear(16, 4))
    # As packed stages: a tracer would look through the probe's forward.
    options: dict[str, Any] = {"slice_options": {"pack": list}, "n_micro_batches": 4, "callbacks": [Look()]}
    sliced_train(model, MLP.batches(4), SGD, nn.CrossEntropyLoss(), n=3, **options)
    assert len(made) >= 4 * 4 * 2
    assert alive == [0, 0, 0, 0]


def peak_alive(schedule: str, m: int, **options: Any) -> int:
    """Return how many outputs of the first stage's probe are alive at once, at most."""
    made: list[weakref.ref[Tensor]] = []
    peak = [0]

    class Front(Probe):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x).sin()  # sin keeps its input for the backward pass
            peak[0] = max(peak[0], sum(ref() is not None for ref in made))
            return out

        def __deepcopy__(self, memo: dict[int, Any]) -> Front:
            return Front(made)

    model = nn.Sequential(nn.Linear(16, 16), Front(made), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    slicing = {"pack": list, "strategy": lambda graph, n: [2]}
    options = {"slice_options": slicing, "schedule": schedule, "n_micro_batches": m, **options}
    sliced_train(model, MLP.batches(1, size=16), SGD, nn.CrossEntropyLoss(), n=2, **options)
    return peak[0]


def test_s29_in_flight_micro_batches_are_bounded() -> None:
    """GPipe keeps m micro-batches in the first stage, 1F1B no more than there are stages."""
    assert peak_alive("gpipe", 8) == 8
    assert peak_alive("1f1b", 8) <= 2


def test_s29_recomputation_keeps_no_activations_in_flight() -> None:
    """With recompute="always" only the boundary values wait for the backward pass."""
    assert peak_alive("gpipe", 8, recompute="always") <= 2


def test_s29_training_leaves_no_gradients_behind() -> None:
    """After train() the model has no gradients and no hooks of ours."""
    result = sliced_train(mlp4(), MLP.batches(2), SGD, nn.CrossEntropyLoss(), n=3, n_micro_batches=2)
    assert result.model is not None
    assert all(p.grad is None for p in result.model.parameters())
    for module in result.model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert not module._forward_pre_hooks


def test_s29_a_sliced_model_is_collected() -> None:
    """Nothing global holds a sliced model or its model."""
    model = mlp4()
    sliced = ts.slice(model, n=2)
    sliced.train(MLP.batches(2), SGD, nn.CrossEntropyLoss(), epochs=1, run_dir=False)
    gone = [weakref.ref(model), weakref.ref(sliced)]
    del model, sliced
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_predicting_keeps_no_graph() -> None:
    """predict() returns plain tensors."""
    out = ts.slice(mlp4(), n=2).predict([torch.randn(3, 16)])
    first = out if isinstance(out, Tensor) else next(iter(out))
    assert first.grad_fn is None
    assert first.shape == (3, 4)

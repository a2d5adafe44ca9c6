"""SCENARIOS S44 (its local part), S50 and S51: odd modules, getting the weights back, evaluation in the middle."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchslicer as ts
from tests.support.driver import sliced_train, train_case
from tests.support.models import BN_CONV, BN_MLP, GPT, GPT_CASE, MLP, Case, mlp4, tokens
from tests.support.nets_values import TiedLM
from tests.support.oracle import ADAM, SGD, Result, assert_same_bits, reference_train, snapshot

CRITERION = nn.CrossEntropyLoss()
TIED = Case("tied", lambda dropout: TiedLM(), tokens(vocab=50, length=6))


class WithLambda(nn.Module):
    """A layer that holds what cannot be pickled or copied: a lambda and a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.activation = lambda x: torch.tanh(x) * 2
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


def test_s44_layers_with_lambdas_and_locks_work_locally() -> None:
    """`Can't get attribute`: local training neither pickles nor copies the user's modules."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(WithLambda(), nn.Linear(16, 16), WithLambda(), nn.Linear(16, 4))

    model, plain = build(), build()
    sliced = ts.slice(model, n=2)
    sliced.train(MLP.batches(3), {"name": "SGD", "params": {"lr": 0.1}}, CRITERION, epochs=1, run_dir=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in MLP.batches(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert_same_bits(Result(snapshot(model), []), Result(snapshot(plain), []))


@pytest.mark.parametrize("case", [MLP, BN_CONV, GPT_CASE, TIED], ids=lambda case: case.name)
@pytest.mark.parametrize("n", [1, 3])
def test_s50_the_state_dict_has_the_models_own_names(case: Case, n: int) -> None:
    """Keys, order, dtypes and shapes are those of `model.state_dict()`, buffers included; strict loading works."""
    result = train_case(case, SGD, n=n, steps=2)
    fresh = case.model(seed=5)
    state = result.extra["sliced"].state_dict()
    assert list(state) == list(fresh.state_dict())
    fresh.load_state_dict(state, strict=True)
    assert {name: t for name, t in snapshot(fresh).items() if name in state}.keys() == state.keys()
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, result.state[name]), name
        assert not state[name].requires_grad


def test_s50_the_callers_model_holds_the_trained_weights() -> None:
    """`the parameters of the model did not change`: after train() the model that was sliced is the trained one."""
    case = BN_CONV
    model = case.model().train()
    parameters = dict(model.named_parameters())
    expected = reference_train(case.model(), case.batches(3), SGD, CRITERION)
    ts.slice(model, n=3).train(case.batches(3), SGD, CRITERION, epochs=1, run_dir=False)
    assert_same_bits(Result(snapshot(model), []), expected, losses=False)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_s50_flags_are_as_before() -> None:
    """`training` flags and `requires_grad` survive."""
    model = BN_MLP.model()
    model.train()
    model.get_submodule("5").eval()
    model.get_submodule("0").requires_grad_(False)
    flags = [module.training for module in model.modules()]
    needs = [p.requires_grad for p in model.parameters()]
    sliced = ts.slice(model, n=2)
    sliced.train(BN_MLP.batches(2), SGD, CRITERION, epochs=1, eval_loader=BN_MLP.batches(1), run_dir=False)
    assert [module.training for module in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == needs


@pytest.mark.parametrize("case", [MLP, BN_CONV, TIED], ids=lambda case: case.name)
def test_s50_merge_gives_a_normal_module(case: Case) -> None:
    """merge() is of the user's class, computes what the sliced model computes, and ties what was tied."""
    result = train_case(case, ADAM, n=3, steps=2)
    sliced = result.extra["sliced"]
    merged = sliced.merge()
    assert type(merged) is type(case.model())
    x = case.batches(1, seed=8)[0][0]
    predicted = sliced.predict([x])
    predicted = predicted if isinstance(predicted, Tensor) else next(iter(predicted))
    assert torch.equal(merged.eval()(x), predicted)
    if isinstance(merged, TiedLM):
        assert merged.head.weight is merged.emb.weight


def test_s50_loading_a_state_dict() -> None:
    """load_state_dict takes original names, is strict, and names what is missing and unexpected."""
    donor = mlp4()
    sliced = ts.slice(mlp4(), n=3)
    sliced.load_state_dict(donor.state_dict())
    assert all(torch.equal(t, donor.state_dict()[name]) for name, t in sliced.state_dict().items())
    bad = {**donor.state_dict(), "extra.weight": torch.zeros(1)}
    del bad["0.weight"]
    before = {name: t.clone() for name, t in sliced.state_dict().items()}
    with pytest.raises(
        (ValueError, RuntimeError, KeyError), match=r"(?s)0\.weight.*extra\.weight|extra\.weight.*0\.weight"
    ):
        sliced.load_state_dict(bad)
    assert all(torch.equal(t, before[name]) for name, t in sliced.state_dict().items())


def test_s50_frozen_and_unused_parameters_come_back_too() -> None:
    """Every entry, trained or not."""
    model = GPT()
    model.unused = nn.Linear(3, 3)  # type: ignore[assignment]
    sliced = ts.slice(model, n=2)
    assert "unused.weight" in sliced.state_dict()
    assert list(sliced.state_dict()) == list(model.state_dict())


def bn_dropout(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 4),
    )  # fmt: skip


NOISY = Case("bn_dropout", bn_dropout, BN_MLP.batch, batch_size=16, random=True, batch_norm=True)


def test_s51_evaluation_in_the_middle_changes_nothing() -> None:
    """The training history is that of a run that never evaluates, random numbers included."""
    never = train_case(NOISY, SGD, n=3, steps=3, epochs=3)
    often = train_case(NOISY, SGD, n=3, steps=3, epochs=3, eval_loader=NOISY.batches(2, seed=9), metrics=["accuracy"])
    assert_same_bits(often, never)
    assert len(often.extra["recorder"].evaluations) == 3


def test_s51_evaluation_from_a_callback_changes_nothing() -> None:
    """Evaluating and predicting between two steps, by the user's own callback."""

    class Evaluates(ts.TrainingCallback):
        sliced: Any = None

        def on_step_end(self, step: int, metrics: Any) -> None:
            self.sliced.evaluate(NOISY.batches(1, seed=9), CRITERION)
            self.sliced.predict([NOISY.batches(1, seed=9)[0][0]])

    never = train_case(NOISY, SGD, n=2, steps=3)
    model, callback = NOISY.model().train(), Evaluates()
    callback.sliced = ts.slice(model, n=2)
    callback.sliced.train(NOISY.batches(3), SGD, CRITERION, epochs=1, callbacks=[callback], run_dir=False)
    assert_same_bits(Result(snapshot(model), []), never, losses=False)


def test_s51_evaluation_switches_off_dropout_and_statistics_in_every_part() -> None:
    """Two evaluations agree exactly, equal the unsplit model's, and change no buffer."""
    result = train_case(NOISY, SGD, n=4, steps=3)
    sliced, model = result.extra["sliced"], result.model
    assert model is not None
    before = Result(snapshot(model), [])
    batches = NOISY.batches(2, seed=9)
    one, two = sliced.evaluate(batches, CRITERION), sliced.evaluate(batches, CRITERION)
    assert one == two
    assert_same_bits(Result(snapshot(model), []), before)
    merged = sliced.merge().eval()
    with torch.no_grad():
        losses = [float(F.cross_entropy(merged(x), y)) for x, y in batches]
    assert one["loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_s51_the_structure_of_evaluation_is_the_models_own() -> None:
    """A head that is there in training only is not there in evaluation."""

    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.aux = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.body(x))
            return self.head(h) + self.aux(h) if self.training else self.head(h)

    torch.manual_seed(0)
    result = sliced_train(Aux(), MLP.batches(3), SGD, CRITERION, n=2)
    assert result.model is not None
    assert_same_bits(result, reference_train_of(Aux))
    x = MLP.batches(1, seed=9)[0][0]
    predicted = result.extra["sliced"].predict([x])
    predicted = predicted if isinstance(predicted, Tensor) else next(iter(predicted))
    assert torch.equal(predicted, result.model.eval()(x))


def reference_train_of(kind: type[nn.Module]) -> Result:
    """Return the hand-written run of a fresh model."""
    torch.manual_seed(0)
    return reference_train(kind(), MLP.batches(3), SGD, CRITERION)

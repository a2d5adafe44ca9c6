"""What went wrong once. Each test has the story in one line, and asserts the right value."""

# Calling a module gives Any for mypy; casting every return would hide the models.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchslicer as ts
from tests.support.models import MLP, mlp4
from tests.support.nets_values import Net
from tests.support.oracle import SGD, Result, assert_same_bits, reference_train, snapshot
from torchslicer.errors import CallbackError, ConfigError, DataError, SliceError, TorchSlicerError, TraceError

CRITERION = nn.CrossEntropyLoss()


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def trained(model: nn.Module, criterion: Any = CRITERION, *, n: int = 2, **options: Any) -> Result:
    """Train a copy on fresh data, sliced."""
    model = copy.deepcopy(model)
    example = options.pop("example", None)
    ts.slice(model, n=n, example=example).train(MLP.batches(3), SGD, criterion, epochs=1, run_dir=False, **options)
    return Result(snapshot(model), [])


def assert_exact(model: nn.Module, criterion: Any = CRITERION, *, n: int = 2, **options: Any) -> None:
    expected = reference_train(model, MLP.batches(3), SGD, criterion)
    assert_same_bits(trained(model, criterion, n=n, **options), expected, losses=False)


# -- outputs ---------------------------------------------------------------------------------------------------------


class Scaled(Net):
    """Returns one of its parameters, which nothing else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.d(torch.tanh(self.b(torch.tanh(self.a(x))))), "own": self.scale}


class Tied(Net):
    """Returns a parameter that two of its layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))), "own": self.a.weight}


class Penalised(nn.Module):
    def forward(self, output: Mapping[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["scores"], target) + 0.1 * output["own"].square().sum()


@pytest.mark.parametrize("kind", [Scaled, Tied])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_parameter_that_is_an_output_is_trained(kind: Any, n: int) -> None:
    """Verification died of a bare KeyError; without it the parameter was not trained, or lost its penalty."""
    assert_exact(seeded(kind), Penalised(), n=n)


class InputBack(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.d(torch.tanh(self.a(x))), x


def test_an_input_that_is_an_output() -> None:
    """Handed through unchanged, also in pieces."""
    model = seeded(InputBack)
    sliced = ts.slice(model, n=2)
    x = torch.randn(6, 16)
    assert torch.equal(sliced.predict([x])[1], x)
    assert_exact(model, lambda output, target: F.cross_entropy(output[0], target) + 0 * output[1].sum())


# -- inputs ----------------------------------------------------------------------------------------------------------


class InPlaceOnInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.d(torch.tanh(self.a(x)))


@pytest.mark.parametrize("strategy", ["uniform", "time"])
def test_looking_at_a_model_does_not_change_the_users_batch(strategy: str) -> None:
    """A model that changes its input in place did so on the user's example, several times over."""
    x = torch.randn(8, 16)
    before = x.clone()
    ts.slice(seeded(InPlaceOnInput), n=2, strategy=strategy, example=x)
    assert torch.equal(x, before)


def test_a_model_that_changes_its_input_in_place_is_exact() -> None:
    """It was refused: model and graph saw two different inputs."""
    assert_exact(seeded(InPlaceOnInput))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((["a", "b"], torch.tensor([0, 1])), "list of 2"),
        ((torch.randn(4, 16).double(), torch.tensor([0, 1, 2, 3])), "dtype"),
        ((torch.randn(16), torch.tensor(1)), r"shape \(4,\)|shape \(16,\)"),
    ],
    ids=["strings", "float64", "one sample"],
)
def test_a_batch_on_which_the_model_itself_fails_is_named(batch: Any, says: str) -> None:
    """A bare TypeError or RuntimeError from deep inside torch."""
    with pytest.raises(DataError, match="itself fails on this batch") as caught:
        ts.slice(mlp4(), n=2).train([batch], SGD, CRITERION, epochs=1, run_dir=False)
    assert caught.match(says)


def test_sparse_gradients_are_compared() -> None:
    """torch.equal knows no sparse tensors."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x.abs().long() % 16).mean(1))

    spec = {"name": "SGD", "params": {"lr": 0.1}}
    model = seeded(Words)
    expected = reference_train(model, MLP.batches(2), spec, CRITERION)
    ts.slice(model, n=2).train(MLP.batches(2), spec, CRITERION, epochs=1, run_dir=False)
    assert_same_bits(Result(snapshot(model), []), expected, losses=False)


# -- state in attributes ---------------------------------------------------------------------------------------------


class Remembers(Net):
    """Adds what the last call left."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if self.last is None else self.a(x) + self.last
        self.last = h.detach()
        return self.d(torch.tanh(h))


class WarmsUp(Net):
    """A number that grows from call to call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.d(torch.tanh(self.a(x)) * min(1.0, self.calls / 3))


@pytest.mark.parametrize(("kind", "name"), [(Remembers, "last"), (WarmsUp, "calls")])
@pytest.mark.parametrize("given", [False, True], ids=["plain", "example"])
def test_state_in_attributes_is_refused_by_name(kind: Any, name: str, given: bool) -> None:
    """The first call's state was recorded as a constant and used in every step, without a word."""
    with pytest.raises(TraceError, match=f"keeps state from call to call in '{name}'"):
        ts.slice(seeded(kind), n=2, example=torch.randn(8, 16) if given else None)


def test_a_submodule_with_state_is_kept_whole_and_keeps_it() -> None:
    """The same in a submodule: it becomes one unit, and verification does not move its state."""

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = WarmsUp()
            self.inner.d = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.inner(torch.tanh(self.a(x))))

    model = seeded(Outer)
    sliced = ts.slice(model, n=2, example=torch.randn(8, 16))
    assert model.inner.calls == 0
    assert any("inner" in attempt for attempt in sliced.graph.attempts)
    assert_exact(model, n=3)


def test_attributes_that_are_only_written_do_not_keep_a_model_from_being_cut() -> None:
    """Attention maps and the like: nothing of the trace stays in them."""

    class Logs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.hidden: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = torch.tanh(self.a(x))
            self.seen.append(self.hidden)
            return self.d(self.hidden)

    model = seeded(Logs)
    ts.slice(model, n=2, example=torch.randn(8, 16))
    assert model.seen == []
    assert model.hidden is None
    assert_exact(model)


def test_a_mutable_default_stays_as_it_was() -> None:
    """A stand-in of the trace stayed in the default argument of the user's function."""

    class Caches(Net):
        def forward(self, x: Tensor, cache: dict[str, Any] = {}) -> Tensor:  # noqa: B006 - the point of the test
            cache["h"] = self.a(x)
            return self.d(torch.tanh(cache["h"]))

    ts.slice(seeded(Caches), n=2)
    assert Caches.forward.__defaults__ == ({},)


class Bounded(nn.Linear):
    """A layer with a max-norm constraint, as in EEGNet."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


def test_weights_set_in_forward_are_set_in_every_step() -> None:
    """The assignment was made on the tracer's stand-in and lost; verification saw weights that were bounded by then."""

    class Constrained(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b = Bounded(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.d(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = seeded(Constrained)
    assert {unit.name: unit.kind for unit in ts.slice(model, n=2).graph.units}["b"] == "opaque"
    assert_exact(model, n=3)


# -- random numbers --------------------------------------------------------------------------------------------------


class SkipsAtRandom(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.a(x))) if self.draw() < 0.5 else self.d(self.b(self.a(x)))

    def draw(self) -> float:
        return random.random()


class SkipsByNumpy(SkipsAtRandom):
    def draw(self) -> float:
        return float(np.random.rand())  # noqa: NPY002 - as models do


class OwnMask(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.a(x)) * torch.bernoulli(torch.full((16,), 0.5)))


@pytest.mark.parametrize("kind", [SkipsAtRandom, SkipsByNumpy, OwnMask])
def test_random_numbers_drawn_while_tracing_are_no_constants(kind: Any) -> None:
    """Layer drop by `random`, a mask on a new tensor: one draw became the model, for good."""
    model = seeded(kind)
    python, numbers, own = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    with pytest.raises(TraceError, match="draws random numbers"):
        ts.slice(model, n=2)
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numbers)  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), own)


def test_a_submodule_that_skips_at_random_is_kept_whole() -> None:
    """It draws anew in every step, and model and graph draw alike when they are compared."""
    model = nn.Sequential(nn.Linear(16, 16), SkipsAtRandom(), nn.Linear(4, 4))
    sliced = ts.slice(model, n=3, example=torch.randn(8, 16))
    assert sliced.graph.units[1].kind == "opaque"


# -- values that cross cuts ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    h: Tensor
    k: int


class MakesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Pair:
        return Pair(torch.tanh(self.linear(x)) if bool(x.sum() > -1e9) else x, 2)


class TakesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, pair: Pair) -> Tensor:
        return self.linear(pair.h) * pair.k if bool(pair.h.sum() > -1e9) else pair.h


class Pairs(Net):
    def __init__(self) -> None:
        super().__init__()
        self.make, self.one, self.two = MakesPair(), TakesPair(), TakesPair()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.make(self.a(x))
        return self.d(torch.tanh(self.one(pair) + self.two(pair)))


def test_objects_with_tensors_inside_do_not_cross_cuts() -> None:
    """A dataclass crossed with its autograd graph: "backward through the graph a second time"."""
    with pytest.raises(SliceError, match="hands on a Pair, whose tensors cannot cross a cut"):
        ts.slice(seeded(Pairs), n=5, example=torch.randn(8, 16))
    assert_exact(seeded(Pairs), n=3, example=torch.randn(8, 16))


# -- threads ---------------------------------------------------------------------------------------------------------


def test_several_models_are_cut_and_trained_in_threads() -> None:
    """A trace replaces methods of torch for the whole process; other threads were traced along."""
    expected = reference_train(seeded(mlp4), MLP.batches(3), SGD, CRITERION)
    models = [seeded(mlp4) for _ in range(3)]
    failed: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            ts.slice(model, n=2).train(MLP.batches(3), SGD, CRITERION, epochs=1, run_dir=False)
        except BaseException as error:  # noqa: BLE001 - reported below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for model in models:
        assert_same_bits(Result(snapshot(model), []), expected, losses=False)


# -- settings, callbacks, metrics ------------------------------------------------------------------------------------


def test_a_number_of_microbatches_given_as_text_is_a_number() -> None:
    """TypeError: '>' not supported between instances of 'str' and 'int'."""
    assert_same_bits(trained(seeded(mlp4), n_micro_batches="2"), trained(seeded(mlp4), n_micro_batches=2), losses=False)
    with pytest.raises(ConfigError, match=r"(?s)n_micro.*many"):
        trained(seeded(mlp4), n_micro_batches="many")


def test_one_callback_outside_a_list() -> None:
    """TypeError: 'TrainingCallback' object is not iterable."""
    with pytest.raises(ConfigError, match="expected a list of callbacks"):
        trained(seeded(mlp4), callbacks=ts.TrainingCallback())


@pytest.mark.parametrize("target", [torch.zeros(8, 1).long(), torch.zeros(8, 4).long(), torch.zeros(4).long()])
def test_accuracy_does_not_broadcast(target: Tensor) -> None:
    """Targets (B, 1) were compared with every sample: a number, but the wrong one."""
    with pytest.raises(DataError, match="expected scores"):
        ts.slice(mlp4(), n=2).evaluate([(torch.randn(8, 16), target)], metrics=["accuracy"])


def test_accuracy_of_a_dictionary_says_what_to_do() -> None:
    """AttributeError: 'dict' object has no attribute 'argmax'."""
    with pytest.raises(DataError, match="expected tensors, got dict with keys"):
        ts.slice(seeded(Scaled), n=2).evaluate([(torch.randn(8, 16), torch.zeros(8).long())], metrics=["accuracy"])


def test_a_metric_that_raises_is_named() -> None:
    """A bare ZeroDivisionError."""
    with pytest.raises(CallbackError, match="metric 'ratio': ZeroDivisionError"):
        ts.slice(mlp4(), n=2).evaluate(MLP.batches(1), metrics={"ratio": lambda output, target: 1 / 0})


def test_a_metric_class_instead_of_an_instance() -> None:
    """TypeError: reset() missing 1 required positional argument: 'self'."""

    class Metric:
        def update(self, output: Any, target: Any) -> None: ...
        def compute(self) -> float: ...
        def reset(self) -> None: ...

    with pytest.raises(ConfigError, match="not a class"):
        ts.slice(mlp4(), n=2).evaluate(MLP.batches(1), metrics={"m": Metric})


def test_a_torchscript_trace_has_no_signature() -> None:
    """ValueError: no signature found for <torch.ScriptMethod object>."""

    class Script(nn.Module):
        forward = property(lambda self: type)  # type: ignore[assignment]  # inspect cannot read a builtin either

    model = Script()
    with pytest.raises(SliceError, match="cannot be read from its forward pass"):
        ts.slice(model, n=1)


# -- not right yet ---------------------------------------------------------------------------------------------------


def test_training_under_no_grad_is_refused() -> None:
    """A plain loop fails with "does not require grad"; here nothing was trained and a loss was reported."""
    with torch.no_grad(), pytest.raises(TorchSlicerError):
        trained(seeded(mlp4))


def test_a_detached_output_is_refused() -> None:
    """Nothing was trained, without a word."""

    class Detached(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.d(torch.tanh(self.a(x))).detach()

    with pytest.raises(TorchSlicerError):
        trained(seeded(Detached))


@pytest.mark.parametrize("how", ["assigned", "loaded"])
def test_parameters_replaced_after_slice_are_trained(how: str) -> None:
    """The old Parameter object went on being trained, while the layer used the new one."""
    model = seeded(mlp4)
    sliced = ts.slice(model, n=2)
    if how == "assigned":
        model.get_submodule("0").weight = nn.Parameter(torch.randn(32, 16))
    else:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    expected = reference_train(model, MLP.batches(3), SGD, CRITERION)
    sliced.train(MLP.batches(3), SGD, CRITERION, epochs=1, run_dir=False)
    assert_same_bits(Result(snapshot(model), []), expected, losses=False)


def test_a_gradient_hook_on_a_tied_parameter_is_run() -> None:
    """A hook that masks gradients works on a parameter with one use and was ignored on a tied one."""
    model = seeded(Tied)
    model.a.weight.register_hook(torch.zeros_like)  # type: ignore[union-attr]
    before = model.a.weight.detach().clone()  # type: ignore[union-attr]
    ts.slice(model, n=2).train(MLP.batches(2), SGD, Penalised(), epochs=1, run_dir=False)
    assert torch.equal(model.a.weight, before)  # type: ignore[arg-type]


def test_clipping_with_sparse_gradients() -> None:
    """NotImplementedError: Could not run 'aten::linalg_vector_norm' with 'SparseCPU'."""
    norms = []

    class Norms(ts.TrainingCallback):
        def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
            norms.append(metrics["grad_norm"])

    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8, sparse=sparse), nn.Flatten(), nn.Linear(16, 4))
        batches = [(torch.randint(16, (8, 2)), torch.randint(4, (8,)))]
        spec = {"name": "SGD", "params": {"lr": 0.1}}
        ts.slice(model, n=2).train(
            batches, spec, CRITERION, epochs=1, max_grad_norm=1.0, run_dir=False, callbacks=[Norms()]
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_training_inside_a_callback_of_the_same_model_is_refused() -> None:
    """RuntimeError: the executor was not set up; in a step long after the cause."""
    sliced = ts.slice(seeded(mlp4), n=2)

    class Trains(ts.TrainingCallback):
        def on_epoch_begin(self, epoch: int) -> None:
            sliced.train(MLP.batches(1), SGD, CRITERION, epochs=1, run_dir=False)

    with pytest.raises(TorchSlicerError, match="is being trained already"):
        sliced.train(MLP.batches(1), SGD, CRITERION, epochs=1, run_dir=False, callbacks=[Trains()])


class Factor(Net):
    """Reads a number that users set between calls."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.a(x)) * self.factor * (2.0 if self.training else 1.0))


def plain_epochs(model: nn.Module, change: Callable[[nn.Module], Any]) -> Result:
    first = reference_train(model, MLP.batches(2), {"name": "SGD", "params": {"lr": 0.1}}, CRITERION)
    assert first.model is not None
    change(first.model)
    return reference_train(
        first.model, MLP.batches(2), {"name": "SGD", "params": {"lr": 0.1}}, CRITERION, train_mode=False
    )


@pytest.mark.parametrize("change", [lambda m: setattr(m, "factor", 3.0), lambda m: m.eval()], ids=["number", "eval"])
def test_a_callback_that_changes_what_forward_reads(change: Callable[[nn.Module], Any]) -> None:
    """The first epoch's number or flag stayed in the graph as a constant: new numbers, or a refusal."""

    class Changes(ts.TrainingCallback):
        def on_epoch_begin(self, epoch: int) -> None:
            if epoch == 2:
                change(model)

    model = seeded(Factor)
    expected = plain_epochs(model, change)
    spec = {"name": "SGD", "params": {"lr": 0.1}}
    try:
        ts.slice(model, n=2).train(MLP.batches(2), spec, CRITERION, epochs=2, run_dir=False, callbacks=[Changes()])
    except SliceError:  # refusing is right, too
        return
    assert_same_bits(Result(snapshot(model), []), expected, losses=False)


def test_a_number_changed_before_predicting() -> None:
    """predict() went on with the number of the time when the model was cut."""
    model = seeded(Factor)
    sliced = ts.slice(model, n=2)
    model.factor = 3.0  # type: ignore[assignment]
    x = torch.randn(4, 16)
    assert torch.equal(sliced.predict([x]), model.eval()(x))


def test_a_file_name_given_for_a_configuration_is_named() -> None:
    model, batches = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [(torch.ones(2, 2), torch.ones(2, 2))]
    says = r"run_config: expected a RunConfig, such as RunConfig\.load.*got 'run\.yaml'"
    with pytest.raises(ts.ConfigError, match=says):
        ts.slice(model, run_config="run.yaml")  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigError, match=says):
        ts.slice(model).train(batches, "SGD", "mse", run_config="run.yaml")  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigError, match=says):
        ts.simulate(model, batches, "SGD", "mse", run_config="run.yaml")
    with pytest.raises(ts.ConfigError, match="builder_args: expected a dictionary of keyword arguments, got "):
        ts.slice("tests.support.models:GPT", builder_args=[1])  # type: ignore[arg-type]

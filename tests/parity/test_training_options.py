"""Options of training against the hand-written loop: clipping, accumulation, schedulers, bf16, recompute, the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

import torchslicer as ts
from tests.support.awkward import RANDOM
from tests.support.driver import Recorder, reference_case, sliced_train, train_case
from tests.support.models import BN_CONV, BN_MLP, GPT_CASE, MLP, UNET, Case, batchnorm_convnet, tokens
from tests.support.nets_values import TiedLM, frozen
from tests.support.oracle import (
    ADAM,
    ADAMW,
    SGD,
    Result,
    Spec,
    assert_close,
    assert_same_bits,
    reference_outputs,
    reference_train,
    snapshot,
)

quiet_batchnorm = pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning")
TIED = Case("tied_lm", lambda dropout: TiedLM(), tokens(vocab=50, length=6))
BN_DROPOUT = Case("bn_dropout", lambda dropout: batchnorm_convnet(0.3), BN_CONV.batch, random=True, batch_norm=True)


# Clipping


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("case", [MLP, GPT_CASE, TIED], ids=lambda case: case.name)
def test_clipping_equals_clip_grad_norm(case: Case, n: int) -> None:
    expected = reference_case(case, SGD, steps=4, max_grad_norm=0.05)
    result = train_case(case, SGD, n=n, steps=4, max_grad_norm=0.05)
    assert_same_bits(result, expected, where=f"n={n}")
    assert list(result.norms) == pytest.approx(list(expected.norms), rel=1e-6)


def test_clipping_with_microbatches_uses_the_norm_of_the_whole_gradient() -> None:
    expected = reference_case(MLP, SGD, steps=4, max_grad_norm=0.05, dtype=torch.float64)
    result = train_case(MLP, SGD, n=4, steps=4, max_grad_norm=0.05, dtype=torch.float64, n_micro_batches=4)
    assert_close(result, expected, rtol=1e-9)
    assert list(result.norms) == pytest.approx(list(expected.norms), rel=1e-9)


def test_a_large_limit_clips_nothing() -> None:
    expected = reference_case(MLP, SGD, steps=3)
    assert_same_bits(train_case(MLP, SGD, n=3, steps=3, max_grad_norm=1e9), expected)


# Accumulation


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("batches", [4, 5])
def test_accumulation_equals_larger_batches(batches: int, m: int) -> None:
    # 5 batches in groups of 2: the last group is one batch, applied and not dropped.
    expected = reference_case(MLP, SGD, steps=batches, accumulate=2, dtype=torch.float64)
    result = train_case(MLP, SGD, n=2, steps=batches, accumulate=2, dtype=torch.float64, n_micro_batches=m)
    assert_close(result, expected, rtol=1e-9, losses=False)


def test_accumulation_of_unequal_batches_weighs_by_samples() -> None:
    batches = [*MLP.batches(1, size=8, dtype=torch.float64), *MLP.batches(1, size=3, seed=2, dtype=torch.float64)]
    expected = reference_case(MLP, SGD, steps=2, batches=batches, accumulate=2, dtype=torch.float64)
    result = train_case(MLP, SGD, n=2, steps=2, batches=batches, accumulate=2, dtype=torch.float64)
    assert_close(result, expected, rtol=1e-9, losses=False)


@pytest.mark.parametrize("n", [1, 3])
def test_bits_of_accumulation_do_not_depend_on_the_cut(n: int) -> None:
    first = train_case(GPT_CASE, ADAMW, n=2, steps=5, accumulate=2, n_micro_batches=2, max_grad_norm=0.1, dropout=0.1)
    other = train_case(
        GPT_CASE, ADAMW, n=n, steps=5, accumulate=2, n_micro_batches=2, max_grad_norm=0.1, dropout=0.1, schedule="1f1b"
    )
    assert_same_bits(other, first)


# Schedulers


SchedulerMaker = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, tuple[dict[str, Any], SchedulerMaker]] = {
    "StepLR": ({"step_size": 1, "gamma": 0.5}, lambda opt: StepLR(opt, step_size=1, gamma=0.5)),
    "CosineAnnealingLR": ({"T_max": 6}, lambda opt: CosineAnnealingLR(opt, T_max=6)),
    "OneCycleLR": ({"max_lr": 0.2, "total_steps": 13}, lambda opt: OneCycleLR(opt, max_lr=0.2, total_steps=13)),
}


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, interval: str) -> None:
    params, make = SCHEDULERS[name]
    expected = reference_case(MLP, SGD, steps=4, epochs=3, scheduler=make, interval=interval)
    described = {"name": name, "params": params, "interval": interval}
    result = train_case(MLP, SGD, n=3, steps=4, epochs=3, scheduler=described)
    assert_same_bits(result, expected, where=f"{name} by {interval}")


# Parameter groups


def decay_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW without weight decay on biases and norms."""
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name]
    rest = [p for name, p in model.named_parameters() if not (name.endswith("bias") or "norm" in name)]
    groups = [{"params": rest}, {"params": plain, "weight_decay": 0.0, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.002, weight_decay=0.1)


def test_parameter_groups_by_name_pattern() -> None:
    expected = reference_case(GPT_CASE, decay_groups, steps=5)  # type: ignore[arg-type]
    group = {"match": ["*bias", "*norm*"], "weight_decay": 0.0, "lr": 0.01}
    spec = {"name": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.1, "groups": [group]}}
    for n in (1, 4):
        assert_same_bits(train_case(GPT_CASE, spec, n=n, steps=5), expected, where=f"n={n}")


def test_a_group_pattern_that_matches_nothing_is_refused() -> None:
    spec = {"name": "AdamW", "params": {"groups": [{"match": "no_such_layer.*", "lr": 1.0}]}}
    with pytest.raises(ValueError, match="no_such_layer"):
        train_case(MLP, spec, n=2, steps=1)


# Ways to name optimizer and criterion


@pytest.mark.parametrize("name", ["adamw", "AdamW"])
def test_an_optimizer_by_name_has_torchs_defaults(name: str) -> None:
    expected = reference_case(MLP, {"name": "AdamW", "params": {}}, steps=3)
    assert_same_bits(train_case(MLP, name, n=2, steps=3, criterion="CrossEntropyLoss"), expected)


def test_factories() -> None:
    expected = reference_case(MLP, SGD, steps=3)
    result = train_case(
        MLP, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), n=3, steps=3, criterion=nn.CrossEntropyLoss
    )
    assert_same_bits(result, expected)


OTHERS: list[Spec] = [
    {"name": "RMSprop", "params": {"lr": 0.001, "momentum": 0.5}},
    {"name": "Adagrad", "params": {"lr": 0.01}},
    {"name": "NAdam", "params": {"lr": 0.001}},
    {"name": "Adadelta", "params": {"lr": 0.1}},
    {"name": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
    {"name": "Adam", "params": {"lr": 0.001, "amsgrad": True}},
]


@pytest.mark.parametrize("spec", OTHERS, ids=lambda spec: spec["name"])
def test_other_optimizers(spec: Spec) -> None:
    expected = reference_case(MLP, spec, steps=4)
    assert_same_bits(train_case(MLP, spec, n=3, steps=4), expected, where=str(spec))


# bf16


@pytest.mark.parametrize("case", [MLP, UNET, GPT_CASE], ids=lambda case: case.name)
def test_mixed_precision_is_autocast_with_a_float32_loss(case: Case) -> None:
    expected = reference_case(case, SGD, steps=4, autocast=True)
    result = train_case(case, SGD, n=3, steps=4, mixed_precision=True)
    assert_close(result, expected, rtol=1e-6, where=case.name)
    assert all(tensor.dtype != torch.bfloat16 for tensor in result.state.values())


@pytest.mark.parametrize("m", [1, 4])
def test_bits_of_mixed_precision_do_not_depend_on_the_cut(m: int) -> None:
    first = train_case(GPT_CASE, ADAM, n=1, steps=4, mixed_precision=True, n_micro_batches=m, dropout=0.1)
    for n in (2, 4):
        other = train_case(GPT_CASE, ADAM, n=n, steps=4, mixed_precision=True, n_micro_batches=m, dropout=0.1)
        assert_same_bits(other, first, where=f"n={n}, m={m}")


def test_mixed_precision_changes_something() -> None:
    plain = train_case(MLP, SGD, n=2, steps=2)
    mixed = train_case(MLP, SGD, n=2, steps=2, mixed_precision=True)
    assert plain.losses != mixed.losses
    assert mixed.losses == pytest.approx(plain.losses, rel=0.02)


# Recompute


@quiet_batchnorm
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", [BN_DROPOUT, *RANDOM, GPT_CASE], ids=lambda case: case.name)
def test_recomputation_gives_the_same_bits(case: Case, schedule: str) -> None:
    options: dict[str, Any] = {"n": 3, "steps": 3, "dropout": 0.2, "n_micro_batches": 4, "schedule": schedule}
    never = train_case(case, SGD, **options, recompute="never")
    for recompute in ("except_last", "always"):
        assert_same_bits(train_case(case, SGD, **options, recompute=recompute), never, where=recompute)


def test_recomputation_under_autocast_and_without_microbatches() -> None:
    never = train_case(GPT_CASE, SGD, n=3, steps=3, dropout=0.2, mixed_precision=True)
    always = train_case(GPT_CASE, SGD, n=3, steps=3, dropout=0.2, mixed_precision=True, recompute="always")
    assert_same_bits(always, never)


def test_recomputation_updates_batchnorm_once() -> None:
    result = train_case(BN_MLP, SGD, n=2, steps=3, recompute="always")
    assert int(result.state["1.num_batches_tracked"]) == 3


# BatchNorm


def test_deferred_batchnorm_sees_the_whole_batch() -> None:
    still: Spec = {"name": "SGD", "params": {"lr": 0.0}}
    expected = reference_case(BN_CONV, still, steps=3)
    result = train_case(BN_CONV, still, n=2, steps=3, n_micro_batches=4, batch_norm="deferred")
    # The first layer's input is the same in both; its running statistics must be those of the whole batch.
    for name in ("1.running_mean", "1.running_var"):
        assert torch.allclose(result.state[name], expected.state[name], rtol=1e-5, atol=1e-6), name
    for name in ("1.num_batches_tracked", "4.num_batches_tracked", "7.num_batches_tracked"):
        assert int(result.state[name]) == 3


@pytest.mark.parametrize("n", [1, 4])
def test_bits_of_deferred_batchnorm_do_not_depend_on_the_cut(n: int) -> None:
    options: dict[str, Any] = {"steps": 3, "n_micro_batches": 4, "batch_norm": "deferred"}
    first = train_case(BN_DROPOUT, SGD, n=2, **options)
    other = train_case(BN_DROPOUT, SGD, n=n, recompute="always", **options)
    assert_same_bits(other, first)


# Epochs, history, callbacks


def test_history_of_several_epochs() -> None:
    expected = reference_case(MLP, SGD, steps=3, epochs=4)
    result = train_case(MLP, SGD, n=2, steps=3, epochs=4)
    assert_same_bits(result, expected)
    assert [entry["epoch"] for entry in result.history] == [1, 2, 3, 4]
    for number, entry in enumerate(result.history):
        losses = expected.losses[3 * number : 3 * number + 3]
        assert entry["loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
        assert entry["samples"] == 24
        assert entry["lr"] == pytest.approx(0.05)
        assert entry["duration_s"] > 0
        assert entry["samples_per_s"] > 0


def test_callbacks_are_called_in_order() -> None:
    result = train_case(MLP, SGD, n=2, steps=2, epochs=2, eval_loader=MLP.batches(1, seed=5))
    calls = result.extra["recorder"].calls
    one = ["step_end", "step_end", "evaluate"]
    assert calls == [
        "train_begin", "epoch_begin 1", *one, "epoch_end 1", "epoch_begin 2", *one, "epoch_end 2", "train_end",
    ]  # fmt: skip


def test_a_callback_may_add_to_the_history() -> None:
    class Adds(ts.TrainingCallback):
        def on_epoch_end(self, epoch: int, metrics: Any) -> dict[str, Any]:
            return {"twice": 2 * epoch}

    result = train_case(MLP, SGD, n=2, steps=1, epochs=2, callbacks=[Adds()])
    assert [entry["twice"] for entry in result.history] == [2, 4]


def test_a_callback_that_raises_stops_the_run_with_its_name() -> None:
    class Breaks(ts.TrainingCallback):
        def on_step_end(self, step: int, metrics: Any) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="Breaks") as caught:
        train_case(MLP, SGD, n=2, steps=3, callbacks=[Breaks()])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert str(caught.value.__cause__) == "enough"


def test_observing_changes_nothing() -> None:
    class Draws(ts.TrainingCallback):
        def on_step_end(self, step: int, metrics: Any) -> None:
            torch.rand(step + 1)

    plain = train_case(RANDOM[2], SGD, n=2, steps=3)
    assert_same_bits(train_case(RANDOM[2], SGD, n=2, steps=3, callbacks=[Draws(), Recorder()]), plain)


def test_the_callers_random_state_is_untouched() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    train_case(RANDOM[2], SGD, n=2, steps=2)
    assert torch.equal(torch.get_rng_state(), before)


# Frozen and empty stages


@pytest.mark.parametrize("layers", [("0",), ("0", "2"), ("6", "8"), ("4",)], ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_frozen_layers(layers: tuple[str, ...], n: int) -> None:
    case = Case("frozen", lambda dropout: frozen(*layers), MLP.batch)
    expected = reference_case(case, ADAMW, steps=4)
    result = train_case(case, ADAMW, n=n, steps=4)
    assert_same_bits(result, expected)
    assert result.model is not None
    still = {name for name, p in result.model.named_parameters() if not p.requires_grad}
    assert still == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


def test_stages_without_parameters() -> None:
    def build(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Tanh(), nn.Linear(16, 4), nn.Identity())

    case = Case("empty stages", build, MLP.batch)
    expected = reference_case(case, SGD, steps=3)
    for options in ({}, {"recompute": "always"}, {"max_grad_norm": 1e6}):
        assert_same_bits(train_case(case, SGD, n=6, steps=3, **options), expected, where=str(options))


def test_a_model_without_trainable_parameters_is_refused() -> None:
    case = Case("all frozen", lambda dropout: frozen("0", "2", "4", "6", "8"), MLP.batch)
    with pytest.raises(ValueError, match=r"(?i)parameter"):
        train_case(case, SGD, n=2, steps=1)


def test_a_submodule_in_eval_stays_there() -> None:
    def build(dropout: float) -> nn.Module:
        model = BN_MLP.build(0.0)
        model.train()
        model.get_submodule("1").eval()
        return model

    case = Case("one norm in eval", build, BN_MLP.batch, batch_size=16)
    criterion = nn.CrossEntropyLoss()
    expected = reference_train(case.model(), case.batches(4), SGD, criterion, train_mode=False)
    result = sliced_train(case.model(), case.batches(4), SGD, criterion, n=2, train_mode=False)
    assert_same_bits(result, expected)
    assert result.model is not None
    assert not result.model.get_submodule("1").training


# Evaluation and prediction


def test_evaluating_between_epochs_does_not_change_training() -> None:
    plain = train_case(BN_DROPOUT, SGD, n=3, steps=3, epochs=3)
    watched = train_case(BN_DROPOUT, SGD, n=3, steps=3, epochs=3, eval_loader=BN_DROPOUT.batches(2, seed=7))
    assert_same_bits(watched, plain)
    assert all("eval_loss" in entry for entry in watched.history)
    assert [entry["loss"] for entry in watched.history] == [entry["loss"] for entry in plain.history]


def test_evaluation_equals_the_unsplit_models() -> None:
    case, batches = BN_DROPOUT, BN_DROPOUT.batches(3, seed=7)
    sliced = ts.slice(case.model(), n=3)
    first, second = (sliced.evaluate(batches, nn.CrossEntropyLoss()) for _ in range(2))
    assert first == second
    outputs = reference_outputs(case.model(), [x for x, _ in batches])
    losses = [float(nn.functional.cross_entropy(out, y)) for out, (_, y) in zip(outputs, batches, strict=True)]
    assert first["loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_prediction_keeps_the_order_and_changes_nothing() -> None:
    case = BN_DROPOUT
    inputs = [x for x, _ in case.batches(3, seed=7)]
    inputs[-1] = inputs[-1][:3]
    model = case.model().train()
    before, flags = snapshot(model), [module.training for module in model.modules()]
    sliced = ts.slice(model, n=3)
    state = torch.get_rng_state()
    predicted = sliced.predict(inputs)
    assert torch.equal(torch.get_rng_state(), state)
    joined = predicted if isinstance(predicted, torch.Tensor) else torch.cat(list(predicted))
    assert torch.equal(joined, torch.cat(reference_outputs(model, inputs)))
    assert not joined.requires_grad
    assert [module.training for module in model.modules()] == flags
    assert_same_bits(Result(snapshot(model), []), Result(before, []))
    assert all(p.grad is None for p in model.parameters())


def test_training_again_goes_on_from_the_trained_weights() -> None:
    case, criterion = MLP, nn.CrossEntropyLoss()
    plain: Spec = {"name": "SGD", "params": {"lr": 0.05}}
    expected = reference_case(case, plain, steps=6)
    model = copy.deepcopy(case.model())
    sliced = ts.slice(model, n=2)
    batches = case.batches(6)
    sliced.train(batches[:2], plain, criterion, epochs=1, run_dir=False)
    sliced.evaluate(batches[:1], criterion)
    sliced.predict([batches[0][0]])
    sliced.train(batches[2:], plain, criterion, epochs=1, run_dir=False)
    assert_same_bits(Result(snapshot(model), []), expected, losses=False)

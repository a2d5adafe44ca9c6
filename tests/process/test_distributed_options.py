"""Everything that local training can do, in worker processes: the same bits, the same history."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchslicer as ts
from tests.support.awkward import EXACT, RANDOM
from tests.support.cluster import TRANSPORTS, travelling_by
from tests.support.driver import sliced_train, train_case
from tests.support.models import (
    BN_CONV,
    BN_MLP,
    GPT_CASE,
    MLP,
    MOE,
    TAGGER,
    UNET,
    Case,
    batchnorm_convnet,
    images,
    vectors,
)
from tests.support.nets_boundary import ChannelsLast, Masked, MeanOfWords, Transposed, Wide, sleepy
from tests.support.nets_buffers import averaged, averaged_twice
from tests.support.nets_values import frozen
from tests.support.oracle import ADAM, ADAMW, SGD, Result, assert_same_bits, snapshot
from torchslicer.executors.distributed import DistributedExecutor

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning"),
]

CRITERION = nn.CrossEntropyLoss()
BN_DROPOUT = Case("bn_dropout", lambda dropout: batchnorm_convnet(0.3), BN_CONV.batch, random=True, batch_norm=True)
TWO_UNITS = ("frozen_embedding", "unused")
AWKWARD = [case for case in (*EXACT, *RANDOM) if case.name not in {"shared_buffer", "weight_norm"}]
TIMES = ("duration_s", "samples_per_s")


def timeless(result: Result) -> list[dict[str, Any]]:
    """Return the history without what is measured by a clock."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in result.history]


def assert_same_as_here(
    pool: DistributedExecutor, train: Callable[[dict[str, Any]], Result], where: str = ""
) -> Result:
    """Train here and on the workers, and fail unless bits, histories and norms agree; return what the workers gave."""
    want, got = train({}), train({"executor": pool})
    assert_same_bits(got, want, where=where)
    assert timeless(got) == timeless(want)
    assert list(got.norms) == list(want.norms)
    return got


def assert_case(pool: DistributedExecutor, case: Case, spec: Any, *, n: int, steps: int = 3, **options: Any) -> None:
    assert_same_as_here(pool, lambda extra: train_case(case, spec, n=n, steps=steps, slice_options=extra, **options))


# Awkward models


@pytest.mark.parametrize("case", AWKWARD, ids=lambda case: case.name)
def test_awkward_models(pool: DistributedExecutor, case: Case) -> None:
    assert_case(pool, case, SGD, n=2 if case.name in TWO_UNITS else 3, steps=2, n_micro_batches=2, schedule="1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", AWKWARD, ids=lambda case: case.name)
def test_awkward_models_by_every_transport(pool: DistributedExecutor, case: Case, transport: str) -> None:
    with travelling_by(pool, transport):
        for n in (2,) if case.name in TWO_UNITS else (2, 3):
            assert_case(pool, case, ADAM, n=n, steps=20, n_micro_batches=4)


def test_a_batch_norm_in_two_stages_is_refused_before_anything_runs(pool: DistributedExecutor) -> None:
    """Each worker would keep statistics of its own, which local training does not."""
    [case] = [case for case in EXACT if case.name == "shared_buffer"]
    with pytest.raises(ts.SliceError, match=r"'norm'.*stages 0 and 1.*local"):
        train_case(case, SGD, n=2, steps=1, slice_options={"executor": pool})


def test_weight_norm_is_refused_before_anything_runs(pool: DistributedExecutor) -> None:
    """Parametrizations generate classes at run time, which no worker can import."""
    [case] = [case for case in EXACT if case.name == "weight_norm"]
    with pytest.raises(ts.TorchSlicerError, match=r"'first'.*parametrized"):
        train_case(case, SGD, n=2, steps=1, slice_options={"executor": pool})


@pytest.mark.parametrize("replaces", [False, True])
def test_buffers_that_the_forward_pass_changes(pool: DistributedExecutor, replaces: bool) -> None:
    case = Case("averaged", lambda dropout: averaged(replaces=replaces), vectors())
    assert_case(pool, case, SGD, n=3, n_micro_batches=4, schedule="1f1b")


def test_a_buffer_changed_in_two_stages_is_refused_before_anything_runs(pool: DistributedExecutor) -> None:
    """Each worker would keep one of its own, and one of the two would be lost."""
    case = Case("averaged twice", lambda dropout: averaged_twice(replaces=True), vectors())
    with pytest.raises(ts.SliceError, match=r"buffer '1.mean'.*stages 0 and 1: each worker.*local"):
        train_case(case, SGD, n=3, steps=1, slice_options={"executor": pool})


def test_labels_that_are_no_class_are_named(pool: DistributedExecutor) -> None:
    batch = torch.randn(8, 16), torch.tensor([0, 1, 2, 3, 0, 1, 2, 11])
    says = r"stage 1 on worker .*forward of micro-batch 3 of 4 .*: 1 of 2 targets .*from 11 to 11, expected 0 to 3"
    with pytest.raises(ts.StageError, match=says):
        train_case(MLP, SGD, n=2, steps=1, batches=[batch], n_micro_batches=4, slice_options={"executor": pool})


# Options of training


OPTIONS: dict[str, tuple[Case, Any, dict[str, Any]]] = {
    "clipping": (GPT_CASE, ADAMW, {"max_grad_norm": 0.05, "dropout": 0.1, "n_micro_batches": 2}),
    "accumulation": (GPT_CASE, SGD, {"accumulate": 2, "n_micro_batches": 2, "max_grad_norm": 0.1}),
    "schedule by epoch": (MLP, SGD, {"epochs": 3, "scheduler": {"name": "StepLR", "params": {"step_size": 1}}}),
    "schedule by step": (
        MLP, SGD,
        {"epochs": 2, "scheduler": {"name": "CosineAnnealingLR", "params": {"T_max": 5}, "interval": "step"}},
    ),
    "plateau": (
        MLP, SGD,
        {"epochs": 3, "scheduler": {"name": "ReduceLROnPlateau", "params": {"patience": 0, "threshold": 10.0}}},
    ),
    "groups": (
        GPT_CASE,
        {"name": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.1, "groups": [
            {"match": ["*bias", "*norm*"], "weight_decay": 0.0, "lr": 0.01}]}},
        {},
    ),
    "mixed precision": (GPT_CASE, ADAM, {"mixed_precision": True, "n_micro_batches": 2}),
    "recompute": (UNET, SGD, {"recompute": "always", "n_micro_batches": 2, "dropout": 0.2}),
    "batch norm": (BN_DROPOUT, SGD, {"n_micro_batches": 2}),
    "deferred batch norm": (BN_DROPOUT, SGD, {"n_micro_batches": 2, "batch_norm": "deferred"}),
    "deferred batch norm, recomputed": (
        BN_DROPOUT, ADAM, {"n_micro_batches": 4, "batch_norm": "deferred", "recompute": "except_last"}
    ),
    "seed": (TAGGER, SGD, {"seed": 123, "dropout": 0.5, "n_micro_batches": 3}),
    "auxiliary losses": (MOE, SGD, {"n_micro_batches": 3, "max_grad_norm": 1.0, "accumulate": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(pool: DistributedExecutor, name: str) -> None:
    case, spec, options = OPTIONS[name]
    assert_case(pool, case, spec, n=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_all_options(pool: DistributedExecutor, name: str, n: int, schedule: str, transport: str) -> None:
    case, spec, options = OPTIONS[name]
    with travelling_by(pool, transport):
        assert_case(pool, case, spec, n=n, steps=20, schedule=schedule, **options)


def test_optimizer_and_criterion_as_objects(pool: DistributedExecutor) -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5, 1.0]))
    assert_case(pool, MLP, {"name": "RMSprop", "params": {"lr": 0.01}}, n=3, criterion=criterion)


# Evaluation, prediction, getting the weights back


def test_evaluation_between_epochs(pool: DistributedExecutor) -> None:
    held_out = BN_MLP.batches(3, seed=5)

    def train(extra: dict[str, Any]) -> Result:
        return train_case(
            BN_MLP, SGD, n=3, steps=2, epochs=3, dropout=0.2, eval_loader=held_out, metrics=["accuracy"],
            slice_options=extra,
        )  # fmt: skip

    got = assert_same_as_here(pool, train)
    assert all({"eval_loss", "eval_accuracy"} <= set(record) for record in got.history)


def test_predict_and_evaluate_after_training(pool: DistributedExecutor) -> None:
    batches = BN_MLP.batches(2, seed=5)
    got = train_case(BN_MLP, SGD, n=2, steps=3, slice_options={"executor": pool})
    sliced, model = got.extra["sliced"], got.model
    assert model is not None
    model.eval()
    with torch.no_grad():
        expected = torch.cat([model(x) for x, _ in batches])
    model.train()
    assert torch.equal(sliced.predict(batches), expected)
    assert sliced.evaluate(batches)["loss"] == pytest.approx(
        float(CRITERION(expected, torch.cat([y for _, y in batches]))), rel=1e-6
    )


def test_the_callers_model_is_trained_in_place_buffers_included(pool: DistributedExecutor) -> None:
    model = BN_MLP.model()
    identities = {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    before = snapshot(model)
    sliced = ts.slice(model, n=3, executor=pool)
    sliced.train(BN_MLP.batches(3), SGD, "cross_entropy", epochs=1, run_dir=False)
    after = snapshot(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert identities == {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert int(after["1.num_batches_tracked"]) == 3
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    strict = BN_MLP.model(seed=9)
    strict.load_state_dict(sliced.state_dict(), strict=True)


def test_frozen_parameters_stay_and_stay_frozen(pool: DistributedExecutor) -> None:
    model = frozen("0", "2")
    got = sliced_train(model, MLP.batches(3), ADAMW, "cross_entropy", n=4, slice_options={"executor": pool})
    assert got.model is not None
    flags = {name: parameter.requires_grad for name, parameter in got.model.named_parameters()}
    assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, got.state[name]) is (not parameter.requires_grad)


def test_runs_one_after_the_other(pool: DistributedExecutor) -> None:
    """Training goes on where it stopped, here as there; another model in between leaves no trace."""
    here, there = copy.deepcopy(model := MLP.model()), copy.deepcopy(model)
    batches = MLP.batches(3)
    for number in range(3):
        options: dict[str, Any] = {"epochs": 1, "run_dir": False, "n_micro_batches": number + 1}
        a = ts.slice(here, n=2).train(batches, SGD, "cross_entropy", **options)
        b = ts.slice(there, n=number + 2, executor=pool).train(batches, SGD, "cross_entropy", **options)
        assert [record["loss"] for record in a] == [record["loss"] for record in b]
        train_case(UNET, ADAM, n=2, steps=1, slice_options={"executor": pool})
    assert all(torch.equal(p, q) for p, q in zip(here.state_dict().values(), there.state_dict().values(), strict=True))


# Stages


def test_stages_without_parameters(pool: DistributedExecutor) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8, 4))
    assert_same_as_here(
        pool,
        lambda extra: sliced_train(
            model, MLP.batches(3), SGD, "cross_entropy", n=4, n_micro_batches=2,
            slice_options=extra,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_s31_any_number_of_microbatches_on_four_stages(pool: DistributedExecutor, m: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        assert_case(pool, MLP, SGD, n=4, steps=2, n_micro_batches=m, schedule=schedule)


# Data


@pytest.mark.parametrize("m", [1, 2, 4])
def test_s25_the_last_batch_is_smaller(pool: DistributedExecutor, m: int) -> None:
    loader = DataLoader(TensorDataset(*MLP.batches(1, size=10)[0]), batch_size=4)

    def train(extra: dict[str, Any]) -> Result:
        return sliced_train(MLP.model(), loader, SGD, CRITERION, n=2, n_micro_batches=m, epochs=2, slice_options=extra)

    got = assert_same_as_here(pool, train)
    assert [record["samples"] for record in got.history] == [10, 10]


def test_s25_lengths_that_vary(pool: DistributedExecutor) -> None:
    generator = torch.Generator().manual_seed(0)
    batches: list[Any] = [
        (torch.randint(20, (size, length), generator=generator), torch.randint(4, (size,), generator=generator))
        for size, length in ((4, 5), (3, 9), (6, 2), (4, 5))
    ]
    case = Case("mean", lambda dropout: MeanOfWords(), MLP.batch)
    assert_case(pool, case, SGD, n=3, batches=batches, n_micro_batches=2)


def test_s26_dictionaries(pool: DistributedExecutor) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "input_ids": torch.randint(20, (4, 6), generator=generator),
            "attention_mask": (torch.rand(4, 6, generator=generator) < 0.7).long().index_fill(1, torch.tensor([0]), 1),
            "labels": torch.randint(4, (4,), generator=generator),
        }
        for _ in range(3)
    ]
    torch.manual_seed(0)
    model = Masked()
    assert_same_as_here(
        pool, lambda extra: sliced_train(model, batches, SGD, CRITERION, n=3, n_micro_batches=2, slice_options=extra)
    )


def test_a_data_loader_with_forked_workers(pool: DistributedExecutor) -> None:
    data = TensorDataset(*MLP.batches(1, size=32)[0])

    def train(extra: dict[str, Any]) -> Result:
        loader = DataLoader(
            data, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork",
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        return sliced_train(MLP.model(), loader, SGD, CRITERION, n=2, epochs=2, slice_options=extra)

    assert_same_as_here(pool, train)


def test_s28_labels_stay_with_their_activations_whatever_the_delays(pool: DistributedExecutor) -> None:
    case = Case("sleepy", sleepy, MLP.batch)
    assert_case(pool, case, SGD, n=3, steps=4, n_micro_batches=4, schedule="1f1b")


# What crosses a cut


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_s33_large_layers_and_activations(pool: DistributedExecutor, transport: str) -> None:
    case = Case("wide", lambda dropout: Wide(), MLP.batch)
    with travelling_by(pool, transport):
        assert_case(pool, case, {"name": "SGD", "params": {"lr": 0.01}}, n=3, steps=1, batches=MLP.batches(1, size=512))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_s34_bfloat16_models(pool: DistributedExecutor, transport: str) -> None:
    with travelling_by(pool, transport):
        got = assert_same_as_here(
            pool, lambda extra: train_case(MLP, SGD, n=3, steps=3, dtype=torch.bfloat16, slice_options=extra)
        )
    assert {tensor.dtype for tensor in got.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_s35_layouts(pool: DistributedExecutor, transport: str) -> None:
    with travelling_by(pool, transport):
        assert_case(pool, Case("transposed", lambda dropout: Transposed(), MLP.batch), SGD, n=4, n_micro_batches=2)
        assert_case(pool, Case("channels_last", lambda dropout: ChannelsLast(), images(classes=4)), SGD, n=3)


def test_float64(pool: DistributedExecutor) -> None:
    assert_case(pool, MLP, SGD, n=2, dtype=torch.float64)

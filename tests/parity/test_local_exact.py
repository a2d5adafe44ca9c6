"""Cut, schedule and number of stages change no bit; plain training equals a hand-written loop bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.driver import reference_case, train_case
from tests.support.models import BN_CONV, BN_MLP, GPT_CASE, MAIN, MLP, MOE, TAGGER, UNET, Case
from tests.support.oracle import ADAM, ADAMW, OPTIMIZERS, SGD, Result, Spec, assert_close, assert_same_bits

# BatchNorm under micro-batches is announced by a warning; here only the bits count.
pytestmark = pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning")

Options = dict[str, Any]
PLAIN: Options = {}


def gpipe(m: int) -> Options:
    return {"schedule": "gpipe", "n_micro_batches": m}


def one_f_one_b(m: int) -> Options:
    return {"schedule": "1f1b", "n_micro_batches": m}


def eager(m: int) -> Options:
    return {"schedule": "eager-1f1b", "n_micro_batches": m}


# Everything in one group has the same micro-batches, so it must have the same bits.
FULL_GROUPS = {1: (PLAIN,), 2: (gpipe(2),), 4: (gpipe(4), one_f_one_b(4), eager(4)), 7: (gpipe(7),)}
FULL = [(case, spec, m) for case in MAIN for spec in OPTIMIZERS for m in FULL_GROUPS]
SPECS = {"mlp": SGD, "resnet18": SGD, "unet": ADAM, "gpt": ADAMW, "lstm": ADAM, "moe": SGD}
QUICK = [case for case in MAIN if case.name != "resnet18"]


def assert_equals_oracle(result: Result, expected: Result, case: Case, where: str = "") -> None:
    """Fail unless all bits agree; of a loss with auxiliary terms only the value: their sum may round differently."""
    assert_same_bits(result, expected, where=where or case.name, losses=case is not MOE)
    assert list(result.losses) == pytest.approx(list(expected.losses), rel=1e-6)


def name_of(value: Any) -> str | None:
    if isinstance(value, Case):
        return value.name
    return value["name"] if isinstance(value, dict) and "name" in value else None


def assert_group(case: Case, spec: Spec, group: tuple[Options, ...], *, stages: tuple[int, ...], steps: int) -> None:
    """Fail unless all numbers of stages and all schedules of the group give the same bits, dropout on."""
    first: Result | None = None
    for n in stages:
        for options in group:
            result = train_case(case, spec, n=n, steps=steps, dropout=0.1, **options)
            first = first or result
            assert_same_bits(result, first, where=f"{case.name}, n={n}, {options}")


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_bits_do_not_depend_on_stages_or_schedule(case: Case, m: int) -> None:
    assert_group(case, SPECS[case.name], FULL_GROUPS[m], stages=(1, 2, 4), steps=5)


@pytest.mark.parametrize("m", [2, 7])
def test_bits_do_not_depend_on_stages_with_few_and_many_microbatches(m: int) -> None:
    assert_group(GPT_CASE, SGD, FULL_GROUPS[m], stages=(1, 3), steps=3)


def test_resnet_bits_do_not_depend_on_stages() -> None:
    resnet = MAIN[1]
    plain = train_case(resnet, SGD, n=3, steps=1)
    assert_same_bits(plain, reference_case(resnet, SGD, steps=1), where="resnet18")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "spec", "m"), FULL, ids=name_of)
def test_full_matrix_of_bits(case: Case, spec: Spec, m: int) -> None:
    assert_group(case, spec, FULL_GROUPS[m], stages=(1, 2, 3, 4), steps=20)


@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_plain_equals_a_hand_written_loop(case: Case) -> None:
    spec = SPECS[case.name]
    expected = reference_case(case, spec, steps=6)
    assert_equals_oracle(train_case(case, spec, n=3, steps=6), expected, case)


@pytest.mark.parametrize("case", [BN_MLP, BN_CONV], ids=name_of)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_plain_batchnorm_equals_a_hand_written_loop(case: Case, n: int) -> None:
    expected = reference_case(case, SGD, steps=5)
    assert_same_bits(train_case(case, SGD, n=n, steps=5), expected, where=f"{case.name}, n={n}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=name_of)
@pytest.mark.parametrize("case", MAIN, ids=name_of)
def test_plain_equals_a_hand_written_loop_for_every_n(case: Case, spec: Spec) -> None:
    expected = reference_case(case, spec, steps=20)
    for n in (1, 2, 3, 4):
        assert_equals_oracle(train_case(case, spec, n=n, steps=20), expected, case, f"{case.name}, n={n}")


@pytest.mark.parametrize("options", [gpipe(4), one_f_one_b(7)], ids=str)
@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_microbatches_equal_the_whole_batch(case: Case, options: Options) -> None:
    # 20 steps in float64 (float32 rounding alone drifts further than 1e-6 under Adam), 3 steps in float32 below.
    spec = ADAM if case.name in {"mlp", "gpt"} else SGD
    expected = reference_case(case, spec, steps=20, dtype=torch.float64)
    result = train_case(case, spec, n=3, steps=20, dtype=torch.float64, **options)
    assert_close(result, expected, rtol=1e-9, where=case.name)


@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_microbatches_equal_the_whole_batch_in_float32(case: Case) -> None:
    expected = reference_case(case, SGD, steps=3)
    assert_close(train_case(case, SGD, n=2, steps=3, **gpipe(4)), expected, rtol=1e-6, where=case.name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", OPTIMIZERS, ids=name_of)
@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_microbatches_equal_the_whole_batch_for_every_m(case: Case, spec: Spec) -> None:
    expected = reference_case(case, spec, steps=20, dtype=torch.float64)
    for m in (2, 4, 7):
        result = train_case(case, spec, n=4, steps=20, dtype=torch.float64, **gpipe(m))
        assert_close(result, expected, rtol=1e-9, where=f"{case.name}, m={m}")


@pytest.mark.parametrize("case", [BN_MLP, BN_CONV], ids=name_of)
def test_batchnorm_under_microbatches_does_not_depend_on_stages_or_schedule(case: Case) -> None:
    assert_group(case, SGD, FULL_GROUPS[4], stages=(1, 2, 4), steps=4)


# Losses whose micro-batches do not all count the same

WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5])
TAG_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])
LOSSES: dict[str, tuple[Case, Any]] = {
    "mean": (MLP, nn.CrossEntropyLoss),
    "sum": (MLP, lambda: nn.CrossEntropyLoss(reduction="sum")),
    "class weights": (MLP, lambda: nn.CrossEntropyLoss(weight=WEIGHTS.clone().double())),
    "class weights, sum": (MLP, lambda: nn.CrossEntropyLoss(weight=WEIGHTS.clone().double(), reduction="sum")),
    "label smoothing": (MLP, lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "label smoothing, weights": (MLP, lambda: nn.CrossEntropyLoss(weight=WEIGHTS.double(), label_smoothing=0.1)),
    "ignore_index": (TAGGER, nn.CrossEntropyLoss),
    "ignore_index, weights": (TAGGER, lambda: nn.CrossEntropyLoss(weight=TAG_WEIGHTS.clone().double())),
    "ignore_index, sum": (TAGGER, lambda: nn.CrossEntropyLoss(reduction="sum")),
    "other ignore_index": (MLP, lambda: nn.CrossEntropyLoss(ignore_index=2)),
    "pixels": (UNET, nn.CrossEntropyLoss),
}


@pytest.mark.parametrize("m", [3, 7])
@pytest.mark.parametrize("loss", LOSSES)
def test_unequal_microbatches_are_weighted_as_the_loss_counts(loss: str, m: int) -> None:
    case, make = LOSSES[loss]
    small: Spec = {"name": "SGD", "params": {"lr": 0.01}}
    expected = reference_case(case, small, steps=4, dtype=torch.float64, criterion=make())
    result = train_case(case, small, n=2, steps=4, dtype=torch.float64, criterion=make(), **gpipe(m))
    assert_close(result, expected, rtol=1e-9, where=f"{loss}, m={m}")


REGRESSION = ["MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss"]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", REGRESSION)
def test_elementwise_losses_by_name_and_parameters(name: str, reduction: str) -> None:
    batches = [(x, torch.rand(len(x), 4, dtype=x.dtype)) for x, _ in MLP.batches(3, size=7, dtype=torch.float64)]
    small: Spec = {"name": "SGD", "params": {"lr": 0.01}}
    criterion = getattr(nn, name)(reduction=reduction)
    expected = reference_case(MLP, small, steps=3, dtype=torch.float64, batches=batches, criterion=criterion)
    described = {"name": name, "params": {"reduction": reduction}}
    result = train_case(
        MLP, small, n=3, steps=3, dtype=torch.float64, batches=batches, criterion=described, n_micro_batches=4
    )
    assert_close(result, expected, rtol=1e-9, where=name)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
def test_kl_divergence(reduction: str) -> None:
    torch_batches = MLP.batches(3, size=7, dtype=torch.float64)
    batches = [(x, torch.rand(len(x), 4, dtype=x.dtype).softmax(1)) for x, _ in torch_batches]

    def build(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4), nn.LogSoftmax(1))

    case = Case("kl", build, MLP.batch, lambda: nn.KLDivLoss(reduction=reduction))
    small: Spec = {"name": "SGD", "params": {"lr": 0.01}}
    expected = reference_case(case, small, steps=3, dtype=torch.float64, batches=batches)
    result = train_case(case, small, n=2, steps=3, dtype=torch.float64, batches=batches, n_micro_batches=4)
    assert_close(result, expected, rtol=1e-9, where=reduction)


def test_all_targets_of_a_microbatch_ignored() -> None:
    batches = TAGGER.batches(3, dtype=torch.float64)
    for _, target in batches:
        target[:2] = -100  # the whole first micro-batch of four
    small: Spec = {"name": "SGD", "params": {"lr": 0.05}}
    expected = reference_case(TAGGER, small, steps=3, dtype=torch.float64, batches=batches)
    result = train_case(TAGGER, small, n=2, steps=3, dtype=torch.float64, batches=batches, **gpipe(4))
    assert_close(result, expected, rtol=1e-9)


def test_sum_of_losses_is_not_divided() -> None:
    small: Spec = {"name": "SGD", "params": {"lr": 0.01}}
    criterion = {"name": "CrossEntropyLoss", "params": {"reduction": "sum"}}
    plain = train_case(MLP, small, n=2, steps=1, criterion=criterion)
    cut = train_case(MLP, small, n=2, steps=1, criterion=criterion, **gpipe(8))
    assert plain.losses[0] > 8
    assert abs(cut.losses[0] - plain.losses[0]) < 1e-5

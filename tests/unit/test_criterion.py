"""Losses by name, module or callable; shares of micro-batches add up to the loss of the whole batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchslicer.errors import ConfigError, DataError, StageError
from torchslicer.pipeline.batch import Batch
from torchslicer.pipeline.criterion import Criterion, build_criterion
from torchslicer.pipeline.microbatch import split, split_batch

N, C, T = 11, 5, 3
WEIGHT = [0.5, 2.0, 1.0, 0.1, 3.0]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, ignored: int | None = None) -> torch.Tensor:
    target = torch.randint(0, C, shape, generator=torch.Generator().manual_seed(3))
    if ignored is not None:
        target[: N // 2] = ignored  # so that whole micro-batches are ignored
    return target


def signs(*shape: int) -> torch.Tensor:
    return randn(*shape, seed=5).sign()


LOGITS, POSITIVE = randn(N, C), randn(N, C, seed=7).abs() + 0.1
PROBABILITIES = randn(N, C, seed=2).softmax(1)
CTC_TARGET = (classes(N, 2).clamp_min(1), torch.full((N,), T + 4), torch.full((N,), 2))

CASES: list[tuple[Any, Any, Any]] = [
    ("cross_entropy", LOGITS, classes(N)),
    ({"name": "CrossEntropyLoss", "params": {"label_smoothing": 0.1}}, LOGITS, classes(N)),
    ({"name": "CrossEntropyLoss", "params": {"weight": WEIGHT}}, LOGITS, classes(N)),
    ({"name": "CrossEntropyLoss", "params": {"weight": WEIGHT, "label_smoothing": 0.2}}, LOGITS, classes(N)),
    ({"name": "ce", "params": {"ignore_index": 2}}, LOGITS, classes(N)),
    ("ce", LOGITS, classes(N, ignored=-100)),
    (
        {"name": "ce", "params": {"weight": WEIGHT, "ignore_index": 1, "label_smoothing": 0.1}},
        LOGITS,
        classes(N, ignored=1),
    ),
    ("ce", randn(N, C, T), classes(N, T, ignored=-100)),
    ("ce", LOGITS, PROBABILITIES),
    ({"name": "ce", "params": {"weight": WEIGHT, "label_smoothing": 0.1}}, LOGITS, PROBABILITIES),
    ({"name": "ce", "params": {"reduction": "sum", "weight": WEIGHT}}, LOGITS, classes(N, ignored=-100)),
    ({"name": "nll", "params": {"weight": WEIGHT, "ignore_index": 0}}, LOGITS.log_softmax(1), classes(N)),
    (F.cross_entropy, LOGITS, classes(N, ignored=-100)),
    (functools.partial(F.cross_entropy, ignore_index=2, label_smoothing=0.1), LOGITS, classes(N)),
    ("l1", LOGITS, POSITIVE),
    ("mse", LOGITS, POSITIVE),
    ({"name": "mse_loss", "params": {"reduction": "sum"}}, LOGITS, POSITIVE),
    ("smooth_l1", LOGITS, POSITIVE),
    ("huber", LOGITS, POSITIVE),
    ("poisson_nll", LOGITS, POSITIVE),
    ("gaussian_nll", (LOGITS, POSITIVE), randn(N, C, seed=4)),
    ("kl_div", LOGITS.log_softmax(1), PROBABILITIES),
    ({"name": "kl_div", "params": {"reduction": "batchmean"}}, LOGITS.log_softmax(1), PROBABILITIES),
    ("bce", LOGITS.sigmoid(), PROBABILITIES),
    ({"name": "bce_with_logits", "params": {"pos_weight": WEIGHT}}, LOGITS, PROBABILITIES),
    ("hinge_embedding", LOGITS, signs(N, C)),
    ("multilabel_margin_loss", LOGITS, classes(N, C)),
    ("soft_margin", LOGITS, signs(N, C)),
    ({"name": "multilabel_soft_margin", "params": {"weight": WEIGHT}}, LOGITS, PROBABILITIES.round()),
    ("cosine_embedding", (LOGITS, POSITIVE), signs(N)),
    ("margin_ranking", (randn(N), randn(N, seed=1)), signs(N)),
    ({"name": "multi_margin", "params": {"weight": WEIGHT}}, LOGITS, classes(N)),
    ("triplet_margin", (LOGITS, POSITIVE, randn(N, C, seed=9)), classes(N)),
    ("TripletMarginWithDistanceLoss", (LOGITS, POSITIVE, randn(N, C, seed=9)), classes(N)),
    (lambda output, target: (output - target).pow(4).mean(), LOGITS, POSITIVE),
]


def loss_of_parts(criterion: Criterion, output: Any, target: Any, microbatches: int) -> torch.Tensor:
    pieces = split_batch(Batch({"output": output}, target, N), microbatches)
    shares = criterion.shares([piece.target for piece in pieces], [piece.size for piece in pieces])
    parts = [criterion.weighted_loss(p.inputs["output"], p.target, s) for p, s in zip(pieces, shares, strict=True)]
    return torch.stack(parts).sum()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # KLDivLoss on its own default
@pytest.mark.parametrize("microbatches", [1, 2, 4, 11])
@pytest.mark.parametrize(("spec", "output", "target"), CASES)
def test_shares_add_up_to_the_full_loss(spec: Any, output: Any, target: Any, microbatches: int) -> None:
    criterion = build_criterion(spec)
    leaves = [leaf.clone().requires_grad_() for leaf in (output if isinstance(output, tuple) else (output,))]
    output = tuple(leaves) if isinstance(output, tuple) else leaves[0]
    full = criterion.loss(output, target)
    expected = torch.autograd.grad(full, leaves)
    parts = loss_of_parts(criterion, output, target, microbatches)
    torch.testing.assert_close(parts, full, rtol=1e-6, atol=1e-6)
    for got, want in zip(torch.autograd.grad(parts, leaves), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_ctc_shares() -> None:
    criterion = build_criterion("ctc")
    log_probs = randn(T + 4, N, C).log_softmax(2)
    full = nn.CTCLoss()(log_probs, *CTC_TARGET)
    assert torch.equal(criterion.loss(log_probs, CTC_TARGET), full)
    targets = split(CTC_TARGET, [5, 4, 2], N)
    shares = criterion.shares(targets, [5, 4, 2])
    outputs = log_probs.split([5, 4, 2], dim=1)
    parts = sum(share * criterion.loss(o, t) for o, t, share in zip(outputs, targets, shares, strict=True))
    torch.testing.assert_close(parts, full, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "module", "output", "target"),
    [
        ("CrossEntropyLoss", nn.CrossEntropyLoss(), LOGITS, classes(N)),
        ("gaussian_nll", lambda o, t: nn.GaussianNLLLoss()(o[0], t, o[1]), (LOGITS, POSITIVE), POSITIVE),
        ("cosine_embedding", lambda o, t: nn.CosineEmbeddingLoss()(*o, t), (LOGITS, POSITIVE), signs(N)),
        ("triplet", lambda o, _: nn.TripletMarginLoss()(*o), (LOGITS, POSITIVE, PROBABILITIES), None),
    ],
)
def test_loss_is_torchs_bitwise(spec: str, module: Callable[..., torch.Tensor], output: Any, target: Any) -> None:
    assert torch.equal(build_criterion(spec).loss(output, target), module(output, target))


TRAINABLE = {"AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}
ALL_LOSSES = sorted(name for name in dir(nn) if name.endswith("Loss"))


@pytest.mark.parametrize("name", [name for name in ALL_LOSSES if name not in TRAINABLE])
def test_every_torch_loss_is_reachable(name: str) -> None:
    for spelling in (name, name.lower(), name.removesuffix("Loss"), f"torch.nn.{name}", getattr(nn, name)):
        criterion = build_criterion(spelling)
        assert criterion.name == name
        assert isinstance(criterion.function, getattr(nn, name))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("cross-entropy", "CrossEntropyLoss"),
        ("crossentropy", "CrossEntropyLoss"),
        ("Cross Entropy", "CrossEntropyLoss"),
        ("MAE", "L1Loss"),
        ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
        ("bce_with_logits", "BCEWithLogitsLoss"),
        ("kldiv", "KLDivLoss"),
        ("smooth_l1_loss", "SmoothL1Loss"),
    ],
)
def test_usual_spellings(word: str, name: str) -> None:
    assert build_criterion(word).name == name
    assert build_criterion({"name": word}).name == name


class Learnable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.scale * output - target).square().mean()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cross_entropi", "unknown criterion 'cross_entropi'; did you mean 'CrossEntropyLoss'.*MSELoss"),
        ("mze", "did you mean 'MSELoss'"),
        (
            {"name": "ce", "params": {"label_smooting": 0.1}},
            "unknown parameter 'label_smooting'; did you mean 'label_sm",
        ),
        ({"name": "ce", "parms": {}}, "unknown key 'parms'; did you mean 'params'"),
        ({"name": "ce", "params": [1]}, "must be a dictionary, got list"),
        ({"params": {}}, 'has no "name"'),
        ({"name": "ce", "params": {"reduction": "none"}}, 'reduction="none"'),
        ({"name": "ce", "params": {"reduction": "meen"}}, "no reduction 'meen'; did you mean 'mean'"),
        ({"name": "mse", "params": {"reduction": "batchmean"}}, "no reduction 'batchmean'"),
        (nn.MSELoss(reduction="none"), 'reduction="none"'),
        (functools.partial(F.mse_loss, reduction="none"), 'reduction="none"'),
        ("AdaptiveLogSoftmaxWithLoss", "has parameters of its own"),
        ("linear_cross_entropy", "has parameters of its own"),
        (Learnable(), "Learnable has parameters of its own"),
        (Learnable, "Learnable has parameters of its own"),
        ({"name": "triplet_margin", "params": {"margin": -1}}, "margin"),
        (lambda: 3, "must return a module or a callable"),
        (3, "criterion must be a name"),
        (None, "criterion must be a name"),
    ],
)
def test_refusals(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_criterion(spec)


def test_frozen_loss_modules_are_fine() -> None:
    assert build_criterion(Learnable().requires_grad_(False)).name == "Learnable"


@pytest.mark.parametrize(
    "spec",
    [
        nn.CrossEntropyLoss,
        nn.CrossEntropyLoss(),
        lambda: nn.CrossEntropyLoss(ignore_index=-100),
        functools.partial(nn.CrossEntropyLoss, ignore_index=-100),
        {"name": nn.CrossEntropyLoss, "params": {"ignore_index": -100}},
        F.cross_entropy,
    ],
)
def test_modules_classes_and_factories(spec: Any) -> None:
    criterion = build_criterion(spec)
    assert isinstance(criterion.function, nn.CrossEntropyLoss)
    assert build_criterion(criterion) is criterion


def test_callable_reduction_is_respected() -> None:
    def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum()

    assert build_criterion(summed).shares([None, None], [3, 1]) == [0.75, 0.25]
    summed.reduction = "sum"
    assert build_criterion(summed).shares([None, None], [3, 1]) == [1.0, 1.0]
    partial = functools.partial(lambda o, t, reduction: o.sum(), reduction="sum")
    assert build_criterion(partial).count(None, 3) is None


def test_counts() -> None:
    target = torch.tensor([0, 1, 1, -100])
    assert build_criterion("ce").count(target, 4) == 3
    weighted = build_criterion({"name": "nll", "params": {"weight": [1.0, 2.5]}})
    assert weighted.count(target, 4) == 6.0
    assert build_criterion("ce").count(PROBABILITIES, N) == N
    assert build_criterion("mse").count(target, 4) == 4
    with pytest.raises(DataError, match="2 class weights, targets from 0 to 7"):
        weighted.count(torch.tensor([0, 7]), 2)


@pytest.mark.parametrize("weight", [None, torch.linspace(0.1, 1.0, 200)], ids=["", "weighted"])
def test_labels_of_one_byte_are_never_taken_for_the_ignored_index(weight: torch.Tensor | None) -> None:
    """Compared as bytes, 156 equals -100: the class would not be counted, and every share be wrong."""
    criterion, output = build_criterion(nn.CrossEntropyLoss(weight=weight)), randn(N, 200)
    target = torch.tensor([156, 3, 156, 156, 199, 156, 7, 8, 9, 10, 11], dtype=torch.uint8)
    torch.testing.assert_close(loss_of_parts(criterion, output, target, 3), criterion.loss(output, target))
    criterion._check_classes(output, target, None)  # as on other devices than the CPU
    criterion._check_classes(randn(N, 300), target, None)
    with pytest.raises(StageError, match="5 of 11 targets are no class: they are from 156 to 156, expected 0 to 155"):
        criterion._check_classes(randn(N, 156), target.clamp(max=156), None)


def test_everything_ignored_is_nan_as_in_torch() -> None:
    target = torch.full((N,), -100)
    criterion = build_criterion("ce")
    assert math.isnan(criterion.loss(LOGITS, target))
    assert criterion.shares([target[:6], target[6:]], [6, 5]) == [0.5, 0.5]
    assert math.isnan(loss_of_parts(criterion, LOGITS, target, 2))


def test_share_of_zero_gives_zero_whatever_the_output() -> None:
    output = torch.full((2, C), math.inf, requires_grad=True)
    criterion = build_criterion("ce")
    zero = criterion.weighted_loss(output, torch.tensor([-100, -100]), 0.0)
    zero.backward()
    assert zero.item() == 0.0
    assert torch.equal(output.grad, torch.zeros(2, C))


def test_single_microbatch_keeps_the_bits() -> None:
    criterion = build_criterion("ce")
    assert criterion.shares([classes(N)], [N]) == [1.0]
    assert torch.equal(criterion.weighted_loss(LOGITS, classes(N), 1.0), nn.CrossEntropyLoss()(LOGITS, classes(N)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_is_float32(dtype: torch.dtype) -> None:
    criterion = build_criterion("bce_with_logits")
    loss = criterion.loss(LOGITS.to(dtype), PROBABILITIES.to(dtype))
    assert loss.dtype == torch.float32
    assert criterion.loss(LOGITS.double(), PROBABILITIES.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        product = build_criterion(lambda o, t: (o @ t.T).sum()).loss(LOGITS, PROBABILITIES)
    assert product.dtype == torch.float32


@pytest.mark.parametrize(
    ("spec", "output", "target", "message"),
    [
        (lambda o, t: o - t, LOGITS, LOGITS, r"single number, got shape \(11, 5\)"),
        (lambda o, t: 1.0, LOGITS, LOGITS, "must return a tensor, got float"),
        ("ce", {"logits": LOGITS}, classes(N), r"takes one tensor, the model returns dict with keys \['logits'\]"),
        ("triplet", (LOGITS, LOGITS), None, r"output as \(anchor, positive, negative\), got tuple of 2"),
        ("gaussian_nll", LOGITS, LOGITS, r"output as \(mean, var\), got tensor"),
        ("ctc", LOGITS, LOGITS, r"target \(targets, input_lengths, target_lengths\), got tensor"),
    ],
)
def test_wrong_forms(spec: Any, output: Any, target: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_criterion(spec).loss(output, target)


def test_to_moves_a_copy() -> None:
    module = nn.CrossEntropyLoss(weight=torch.tensor(WEIGHT))
    criterion = build_criterion(module)
    assert criterion.to("cpu") is criterion
    moved = criterion.to("meta")
    assert moved.function.weight.device.type == "meta"
    assert module.weight.device.type == "cpu"
    plain = build_criterion(lambda o, t: o.sum())
    assert plain.to("meta") is plain


def custom_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("spec", "output", "target", "says"),
    [
        ("cross_entropy", randn(3, C), [0, 5, 9], r"Entropy.*: 2 of 3 targets are no class: .*from 5 to 9.*0 to 4"),
        ("nll", randn(2, C), [-1, 4], r"1 of 2 targets .*from -1 to -1, expected 0 to 4 \(or -100.*shape \(2, 5\)"),
        ("cross_entropy", randn(1, C, 2), [[0, 7]], "from 7 to 7, expected 0 to 4"),
        ("cross_entropy", randn(C), 8, "1 of 1 targets .*from 8 to 8, expected 0 to 4"),
        (nn.CrossEntropyLoss(ignore_index=9), randn(2, C), [9, 6], r"1 of 2 .*from 6 to 6.*or 9, which is ignored"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), randn(2, C), [0, 6], "from 6 to 6"),
        (custom_entropy, randn(2, C), [0, 6], r"IndexError.*shape \(2,\) with values from 0 to 6"),
        ("mse", randn(2, 3), [[1, 2]], r"output tensor of shape \(2, 3\), target tensor of shape \(1, 2\)"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_labels_that_are_no_class_are_named(spec: Any, output: torch.Tensor, target: Any, says: str) -> None:
    with pytest.raises(StageError, match=says) as caught:
        build_criterion(spec).loss(output, torch.tensor(target))
    assert isinstance(caught.value.__cause__, (IndexError, RuntimeError))

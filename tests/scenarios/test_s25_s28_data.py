"""SCENARIOS section 4: data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchslicer as ts
from tests.support.driver import reference_case, sliced_train, train_case
from tests.support.models import BN_MLP, MLP, Case, mlp4
from tests.support.oracle import SGD, Spec, assert_close, assert_same_bits, reference_train
from torchslicer.errors import DataError

CRITERION = nn.CrossEntropyLoss()


def ten_samples(dtype: torch.dtype = torch.float32) -> TensorDataset:
    x, y = MLP.batches(1, size=10, dtype=dtype)[0]
    return TensorDataset(x, y)


@pytest.mark.parametrize("m", [1, 2])
def test_s25_the_last_batch_is_smaller(m: int) -> None:
    """10 samples in batches of 4: all are used, and the epoch's loss is the mean over samples."""
    loader = DataLoader(ten_samples(torch.float64), batch_size=4)
    batches = [tuple(batch) for batch in loader]
    expected = reference_train(MLP.model(dtype=torch.float64), batches, SGD, CRITERION, epochs=2)
    result = sliced_train(MLP.model(dtype=torch.float64), loader, SGD, CRITERION, n=2, n_micro_batches=m, epochs=2)
    assert_close(result, expected, rtol=1e-9)
    for number, entry in enumerate(result.history):
        losses = expected.losses[3 * number : 3 * number + 3]
        weighted = sum(loss * len(batch[0]) for loss, batch in zip(losses, batches, strict=True)) / 10
        assert entry["loss"] == pytest.approx(weighted, rel=1e-6)
        assert entry["samples"] == 10


@pytest.mark.parametrize("m", [4, 8])
def test_s25_a_batch_smaller_than_the_number_of_microbatches(m: int) -> None:
    """Two samples cannot make four micro-batches: fewer on every stage alike."""
    batches = [*MLP.batches(1, dtype=torch.float64), *MLP.batches(1, size=2, dtype=torch.float64)]
    batches += MLP.batches(1, size=1, dtype=torch.float64)
    expected = reference_case(MLP, SGD, steps=3, dtype=torch.float64, batches=batches)
    for schedule in ("gpipe", "1f1b"):
        result = train_case(
            MLP, SGD, n=3, steps=3, dtype=torch.float64, batches=batches, n_micro_batches=m, schedule=schedule
        )
        assert_close(result, expected, rtol=1e-9, where=schedule)


def test_s25_shapes_that_vary_from_batch_to_batch() -> None:
    """Another sequence length in each batch."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embed(words)).mean(1))

    generator = torch.Generator().manual_seed(0)
    batches: list[Any] = [
        (torch.randint(20, (size, length), generator=generator), torch.randint(4, (size,), generator=generator))
        for size, length in ((4, 5), (3, 9), (6, 2))
    ]
    case = Case("mean", lambda dropout: Mean(), MLP.batch)
    expected = reference_case(case, SGD, steps=3, batches=batches)
    assert_same_bits(train_case(case, SGD, n=2, steps=3, batches=batches), expected)


class Masked(nn.Module):
    """Takes input_ids and attention_mask by name, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.mix(self.embed(input_ids)))
        if attention_mask is None:
            return self.head(h.mean(1))
        weight = attention_mask.unsqueeze(-1).to(h.dtype)
        return self.head((h * weight).sum(1) / weight.sum(1))


def dictionaries(count: int = 3, label: str = "labels") -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        mask = (torch.rand(8, 5, generator=generator) < 0.7).long()
        mask[:, 0] = 1
        ids = torch.randint(20, (8, 5), generator=generator)
        made.append({"input_ids": ids, "attention_mask": mask, label: torch.randint(4, (8,), generator=generator)})
    return made


@pytest.mark.parametrize("m", [1, 3])
def test_s26_dictionaries_with_labels_inside(m: int) -> None:
    """The default collator of Hugging Face users works, mask included."""
    torch.manual_seed(0)
    model = Masked().double()
    batches = dictionaries()
    plain = [(item["input_ids"], item["attention_mask"], item["labels"]) for item in batches]
    expected = reference_train(model, plain, SGD, CRITERION)
    assert_close(sliced_train(model, batches, SGD, CRITERION, n=2, n_micro_batches=m), expected, rtol=1e-9)


def test_s26_labels_under_another_key() -> None:
    """`target_key` names the target."""
    torch.manual_seed(0)
    model = Masked()
    expected = sliced_train(model, dictionaries(), SGD, CRITERION)
    assert_same_bits(sliced_train(model, dictionaries(label="gold"), SGD, CRITERION, target_key="gold"), expected)


def test_s26_an_unknown_key_is_refused_and_none_is_dropped() -> None:
    """A key that the model does not take is an error that names it."""
    batches = [{**item, "token_types": item["input_ids"]} for item in dictionaries()]
    with pytest.raises(DataError, match="token_types"):
        sliced_train(Masked(), batches, SGD, CRITERION)


def test_s26_a_third_element_is_an_input_or_an_error() -> None:
    """(x, y, weight) for a model with one input: an error with the accepted forms, not a dropped weight."""
    batches = [(x, y, torch.ones(len(x))) for x, y in MLP.batches(2)]
    with pytest.raises(DataError, match="accepted forms"):
        sliced_train(mlp4(), batches, SGD, CRITERION)


@pytest.mark.parametrize("form", [list, tuple], ids=["list", "tuple"])
def test_s26_lists_and_tuples(form: Any) -> None:
    """DataLoader yields lists."""
    expected = reference_case(MLP, SGD, steps=2)
    assert_same_bits(train_case(MLP, SGD, n=2, steps=2, batches=[form(batch) for batch in MLP.batches(2)]), expected)


def test_s26_numpy_batches() -> None:
    """Arrays become tensors."""
    expected = reference_case(MLP, SGD, steps=2)
    arrays: list[Any] = [(x.numpy(), y.numpy()) for x, y in MLP.batches(2)]
    assert_same_bits(train_case(MLP, SGD, n=2, steps=2, batches=arrays), expected)


@pytest.mark.parametrize("bad", [None, 3, {"x": torch.zeros(2, 16)}, (torch.zeros(2, 16),)], ids=str)
def test_s26_what_is_no_batch_is_refused(bad: Any) -> None:
    """No target, no tensor: the error lists the accepted forms."""
    with pytest.raises(DataError):
        sliced_train(mlp4(), [bad], SGD, CRITERION)


def test_s26_targets_of_another_length_are_refused() -> None:
    """7 targets for 8 samples: refused by the library with micro-batches too, not cut to fit."""
    x, y = MLP.batches(1)[0]
    with pytest.raises((ValueError, RuntimeError)):
        sliced_train(mlp4(), [(x, y[:7])], SGD, CRITERION, n_micro_batches=2)


class Seven(IterableDataset[Any]):
    """Seven batches of 8 samples, without a length."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in MLP.batches(7):
            yield from zip(x, y, strict=True)


@pytest.mark.parametrize("verbose", [False, True])
def test_s27_datasets_without_length(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """`len(loader)` was called unconditionally: 7 batches, 2 epochs are 14 steps, each batch trained on."""
    loader: Any = DataLoader(Seven(), batch_size=8)
    result = sliced_train(MLP.model(), loader, SGD, CRITERION, n=2, n_micro_batches=2, epochs=2, verbose=verbose)
    assert len(result.losses) == 14
    assert [entry["samples"] for entry in result.history] == [56, 56]
    capsys.readouterr()


@pytest.mark.parametrize("empty", [[], (), DataLoader([])], ids=["list", "tuple", "loader"])
def test_an_empty_loader_is_refused(empty: Any) -> None:
    """Nothing to train on is an error, not a history of zeros."""
    with pytest.raises(DataError, match=r"(?i)no batch|empty"):
        sliced_train(mlp4(), empty, SGD, CRITERION)


def test_a_loader_that_can_be_read_once_is_refused_for_several_epochs() -> None:
    """A generator has nothing left in epoch 2: say so."""
    with pytest.raises(DataError, match=r"(?i)epoch|once|generator|iterator"):
        sliced_train(mlp4(), iter(MLP.batches(3)), SGD, CRITERION, epochs=2)


def test_a_loader_that_can_be_read_once_serves_one_epoch() -> None:
    """A generator is all right for a single epoch, and its first batch is not lost to verification."""
    expected = reference_case(MLP, SGD, steps=3)
    result = sliced_train(MLP.model(), iter(MLP.batches(3)), SGD, CRITERION)
    assert_same_bits(result, expected)


def test_an_empty_batch_is_refused() -> None:
    """A batch of no samples has no mean."""
    with pytest.raises(DataError, match=r"(?i)empty|no samples"):
        sliced_train(mlp4(), [(torch.zeros(0, 16), torch.zeros(0, dtype=torch.long))], SGD, CRITERION)


def test_several_inputs_in_a_nested_tuple() -> None:
    """((a, b), y) and (a, b, y) are the same."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(torch.cat([self.one(a), self.two(b)], 1))

    torch.manual_seed(0)
    model = Two()
    flat = [(x, x.flip(0), y) for x, y in MLP.batches(3)]
    expected = reference_train(model, flat, SGD, CRITERION)
    nested = [((a, b), y) for a, b, y in flat]
    for batches in (flat, nested):
        assert_same_bits(sliced_train(model, batches, SGD, CRITERION, n=3), expected)


def test_an_input_that_every_microbatch_needs_whole() -> None:
    """A table without a batch dimension is named in `shared_inputs`; without that, the error says so."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.head(torch.tanh(self.one(x)) @ table)

    torch.manual_seed(0)
    model, table = Table().double(), torch.randn(16, 16, dtype=torch.float64)
    batches = [({"x": x, "table": table}, y) for x, y in MLP.batches(2, dtype=torch.float64)]
    flat = [(item["x"], item["table"], y) for item, y in batches]
    expected = reference_train(model, flat, SGD, CRITERION)
    result = sliced_train(model, batches, SGD, CRITERION, n_micro_batches=4, shared_inputs=("table",))
    assert_close(result, expected, rtol=1e-9)
    with pytest.raises(DataError, match=r"shared_inputs"):
        sliced_train(model, batches, SGD, CRITERION, n_micro_batches=4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_s28_labels_are_paired_with_their_own_samples(schedule: str) -> None:
    """Labels are a function of the sample, and the loss of each micro-batch reports which pairs met."""
    met: list[tuple[list[float], list[int]]] = []

    class Pairs(nn.Module):
        reduction = "mean"

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            met.append((output[:, 0].detach().round().tolist(), target.tolist()))
            return F.mse_loss(output[:, 0], target.to(output.dtype))

    model = nn.Sequential(nn.Linear(1, 1), nn.Identity(), nn.Linear(1, 1))
    with torch.no_grad():
        for index in (0, 2):
            model[index].weight.fill_(1.0)
            model[index].bias.fill_(0.0)
    ids = torch.arange(32).reshape(2, 16)
    batches = [(row.float().unsqueeze(1), row) for row in ids]
    still: Spec = {"name": "SGD", "params": {"lr": 0.0}}
    sliced_train(model, batches, still, Pairs(), n=3, n_micro_batches=4, schedule=schedule)
    assert sum(len(targets) for _, targets in met) >= 32
    assert all(outputs == targets for outputs, targets in met)


def test_bool_and_float_targets_and_scalars() -> None:
    """Binary targets for BCE, one output a sample."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    batches = [(x, (y > 1).float()) for x, y in MLP.batches(3)]
    expected = reference_train(model, batches, SGD, nn.BCEWithLogitsLoss())
    assert_same_bits(sliced_train(model, batches, SGD, "BCEWithLogitsLoss", n=3), expected)


def test_a_workers_loader_is_closed() -> None:
    """A shuffled loader gives the same batches for the same seed of its own generator."""
    losses = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(ten_samples(), batch_size=4, shuffle=True, generator=generator)
        losses.append(sliced_train(MLP.model(), loader, SGD, CRITERION, n=2, epochs=2).losses)
    assert losses[0] == losses[1]


def test_evaluation_metrics() -> None:
    """Metrics by name or as functions, over all samples and not per batch."""
    sliced = ts.slice(BN_MLP.model(), n=2)
    batches = [*BN_MLP.batches(2), *BN_MLP.batches(1, size=3, seed=4)]
    outputs = torch.cat([BN_MLP.model().eval()(x) for x, _ in batches]).detach()
    targets = torch.cat([y for _, y in batches])
    right = float((outputs.argmax(1) == targets).double().mean())
    result = sliced.evaluate(batches, CRITERION, metrics=["accuracy"])
    assert result["accuracy"] == pytest.approx(right)
    assert result["loss"] == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-5)

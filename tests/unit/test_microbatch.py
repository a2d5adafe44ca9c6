"""Batches are cut into views of the right sizes and outputs are put together again."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchslicer.errors import ConfigError, DataError
from torchslicer.pipeline.batch import Batch
from torchslicer.pipeline.microbatch import merge_outputs, split, split_batch, split_sizes


class Pair(NamedTuple):
    first: Any
    second: Any


@given(st.integers(1, 500), st.integers(1, 50))
def test_sizes_are_even_and_complete(size: int, num_microbatches: int) -> None:
    sizes = split_sizes(size, num_microbatches)
    assert sum(sizes) == size
    assert len(sizes) == min(size, num_microbatches)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_sizes_refuse_nothing_to_split() -> None:
    assert split_sizes(32, 7) == [5, 5, 5, 5, 4, 4, 4]
    with pytest.raises(DataError, match="no samples"):
        split_sizes(0, 2)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        split_sizes(4, 0)


def test_split_makes_views_and_repeats_what_has_no_samples() -> None:
    x, flag, number = torch.arange(10).reshape(5, 2), torch.tensor(3), 7
    pieces = split({"x": [x], "p": Pair(flag, number), "none": None}, [3, 2], 5)
    assert [piece["x"][0].tolist() for piece in pieces] == [x[:3].tolist(), x[3:].tolist()]
    assert pieces[1]["x"][0].data_ptr() == x[3:].data_ptr()
    assert all(isinstance(piece["p"], Pair) and piece["p"].first is flag for piece in pieces)
    assert all(piece["p"].second == 7 and piece["none"] is None for piece in pieces)


def test_one_piece_is_the_same_object() -> None:
    structure = {"x": torch.zeros(4)}
    assert split(structure, [4], 4)[0] is structure
    batch = Batch(structure, None, 4)
    assert split_batch(batch, 1)[0] is batch


def test_split_names_the_tensor_that_does_not_fit() -> None:
    mask = torch.ones(7, 7)
    message = r"'mask' has shape \(7, 7\), but the batch has 4 samples.*shared_inputs="
    with pytest.raises(DataError, match=message):
        split_batch(Batch({"x": torch.zeros(4), "mask": mask}, torch.zeros(4), 4), 2)
    with pytest.raises(DataError, match=r"'target\[1\]\.w'"):
        split_batch(Batch({}, (torch.zeros(4), {"w": mask}), 4), 2)
    with pytest.raises(DataError, match="do not add up"):
        split(torch.zeros(4), [1, 1], 4)


def test_shared_inputs_are_repeated() -> None:
    mask = torch.ones(4, 7)
    batch = Batch({"x": torch.arange(4), "mask": mask}, torch.arange(4), 4)
    pieces = split_batch(batch, 3, shared=("mask",))
    assert [piece.size for piece in pieces] == [2, 1, 1]
    assert all(piece.inputs["mask"] is mask for piece in pieces)
    assert [piece.target.tolist() for piece in pieces] == [[0, 1], [2], [3]]


def test_merge_is_the_inverse_of_split() -> None:
    structure = {
        "a": torch.randn(7, 2),
        "b": (torch.randn(7), [torch.randn(7, 1, 1)]),
        "c": Pair(torch.arange(7), None),
    }
    merged = merge_outputs(split(structure, split_sizes(7, 3), 7))
    assert torch.equal(merged["a"], structure["a"])
    assert torch.equal(merged["b"][1][0], structure["b"][1][0])
    assert isinstance(merged["c"], Pair)
    assert torch.equal(merged["c"].first, structure["c"].first)
    assert merged["c"].second is None


def test_merge_makes_lists_of_single_numbers() -> None:
    merged = merge_outputs([{"loss": torch.tensor(1.0), "n": 3}, {"loss": torch.tensor(2.0), "n": 4}])
    assert merged == {"loss": [torch.tensor(1.0), torch.tensor(2.0)], "n": [3, 4]}
    assert merge_outputs([torch.tensor(1.0)]) == [torch.tensor(1.0)]
    one = torch.zeros(3)
    assert merge_outputs([one]) is one


def test_merge_refusals() -> None:
    with pytest.raises(DataError, match="no outputs"):
        merge_outputs([])
    with pytest.raises(DataError, match="output 1 has another structure"):
        merge_outputs([(torch.zeros(1),), torch.zeros(1)])
    with pytest.raises(DataError, match=r"'x' of the outputs has different shapes \[\(1, 2\), \(1, 3\)\]"):
        merge_outputs([{"x": torch.zeros(1, 2)}, {"x": torch.zeros(1, 3)}])

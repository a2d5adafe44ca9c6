"""What a loader yields becomes inputs by name, a target and a size; nothing is dropped."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torchslicer.errors import ConfigError, DataError
from torchslicer.pipeline.batch import Batch, BatchReader, batch_size, describe, to_tensors

X, X2, Y = torch.arange(8.0).reshape(4, 2), torch.ones(4, 3), torch.arange(4)
ONE = BatchReader(["x"], ["x"])
TWO = BatchReader(["a", "b"], ["a", "b"])


class Pair(NamedTuple):
    x: Any
    y: Any


HF = BatchReader(["input_ids", "attention_mask", "labels"], ["input_ids"])


def same(batch: Batch, inputs: dict[str, object], target: object, size: int = 4) -> bool:
    return (
        list(batch.inputs) == list(inputs)
        and all(batch.inputs[name] is value for name, value in inputs.items())
        and batch.target is target
        and batch.size == size
    )


@pytest.mark.parametrize("raw", [(X, Y), [X, Y], Pair(X, Y), ({"x": X}, Y), {"x": X, "y": Y}])
def test_pair_forms_for_one_input(raw: object) -> None:
    assert same(ONE.read(raw), {"x": X}, Y)
    assert same(ONE.read_inputs(raw), {"x": X}, Y)


@pytest.mark.parametrize("raw", [((X, X2), Y), [[X, X2], Y], (X, X2, Y), ({"a": X, "b": X2}, Y)])
def test_forms_for_two_inputs(raw: object) -> None:
    assert same(TWO.read(raw), {"a": X, "b": X2}, Y)
    assert same(TWO.read_inputs(raw), {"a": X, "b": X2}, Y)


def test_tuple_is_whole_when_the_model_takes_one_input() -> None:
    pair = (X, X2)
    batch = ONE.read((pair, Y))
    assert batch.inputs["x"][0] is X
    assert batch.inputs["x"][1] is X2
    assert ONE.read(([X], Y)).inputs["x"][0] is X


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target", "y"])
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_dictionary_with_usual_target_key(key: str, kind: type) -> None:
    batch = HF.read(kind({"input_ids": X, "attention_mask": X2, key: Y}))
    assert same(batch, {"input_ids": X, "attention_mask": X2}, Y)


def test_target_key_wins_and_must_exist() -> None:
    reader = BatchReader(["x", "y"], ["x"], target_key="cls")
    assert same(reader.read({"x": X, "y": X2, "cls": Y}), {"x": X, "y": X2}, Y)
    with pytest.raises(DataError, match=r"no key 'cls'.*did you mean 'clss'"):
        reader.read({"x": X, "clss": Y})
    assert same(reader.read_inputs({"x": X}), {"x": X}, None)


def test_required_input_called_y_is_an_input() -> None:
    reader = BatchReader(["x", "y"], ["x", "y"])
    assert same(reader.read({"x": X, "y": X2, "labels": Y}), {"x": X, "y": X2}, Y)
    assert same(reader.read_inputs({"x": X, "y": X2}), {"x": X, "y": X2}, None)
    with pytest.raises(DataError, match="no target"):
        reader.read({"x": X, "y": X2})


@pytest.mark.parametrize("raw", [X, (X,), [X], {"x": X}, ({"x": X},)])
def test_no_target_is_fine_only_for_prediction(raw: object) -> None:
    assert same(ONE.read_inputs(raw), {"x": X}, None)
    with pytest.raises(DataError, match=r"no target.*accepted forms"):
        ONE.read(raw)


def test_prediction_takes_as_many_elements_as_required_inputs() -> None:
    assert same(TWO.read_inputs((X, X2)), {"a": X, "b": X2}, None)
    optional = BatchReader(["a", "b"], ["a"])
    assert same(optional.read_inputs((X, Y)), {"a": X}, Y)
    assert same(optional.read_inputs((X, X2, Y)), {"a": X, "b": X2}, Y)


@pytest.mark.parametrize(
    ("reader", "raw", "message"),
    [
        (ONE, (X, Y, X2), r"3 elements .* takes 1 input\(s\) \['x'\]; accepted forms"),
        (TWO, (X, X, X, Y), "4 elements"),
        (TWO, ({"a": X, "b": X}, Y, Y), "3 elements"),
        (TWO, (X, Y), r"lacks the required input\(s\) \['b'\]"),
        (HF, {"attention_mask": X, "labels": Y}, r"lacks the required input\(s\) \['input_ids'\]"),
        (HF, {"input_id": X, "labels": Y}, "'input_id' that is no input of the model; did you mean 'input_ids'"),
        (ONE, ({"x": X, "w": X}, Y), r"'w' that is no input of the model; its inputs are \['x'\]"),
        (HF, {"input_ids": X, "labels": Y, "label": Y}, "'label' that is no input"),
        (ONE, (), "empty tuple"),
        (ONE, None, "None"),
        (ONE, (1.0, 2.0), "no tensor with a batch dimension"),
        (ONE, (np.array(["a"]), Y), "cannot become a tensor"),
    ],
)
def test_refusals(reader: BatchReader, raw: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        reader.read(raw)


def test_required_must_be_an_input() -> None:
    with pytest.raises(ConfigError, match="'z' is not one of"):
        BatchReader(["x"], ["z"])


def test_numpy_becomes_tensors_and_other_leaves_stay() -> None:
    frozen = np.ones((4, 2), dtype=np.float32)
    frozen.flags.writeable = False
    raw = ({"x": {"image": frozen, "scale": 2.0, "name": "a", "flag": None}}, (np.arange(4), X))
    batch = ONE.read(raw)
    value = batch.inputs["x"]
    assert torch.equal(value["image"], torch.ones(4, 2))
    assert (value["scale"], value["name"], value["flag"]) == (2.0, "a", None)
    assert torch.equal(batch.target[0], torch.arange(4))
    assert batch.target[1] is X
    assert to_tensors(X) is X


def test_size() -> None:
    assert batch_size({"x": torch.zeros(6, 2)}, torch.tensor(1.0)) == 6
    assert batch_size({"x": torch.zeros(6, 2)}, (torch.tensor(1.0), torch.zeros(3))) == 3
    assert batch_size({"a": 3, "x": torch.zeros(5)}, None) == 5
    assert batch_size({}, {"boxes": torch.zeros(2, 4)}) == 2


def test_describe_shows_shapes_not_values() -> None:
    assert describe([X, {"k": 1}]) == "list of 2 (tensor of shape (4, 2), dict with keys ['k'])"

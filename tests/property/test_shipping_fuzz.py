"""Whatever arrives: a stage, or an error that says what is wrong; nothing else, and nothing runs."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import models
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.modules import encode_module
from torchslicer.cluster.shipping.restore import decode_module
from torchslicer.cluster.shipping.stage_codec import encode_stage
from torchslicer.cluster.shipping.stage_restore import decode_stage
from torchslicer.cluster.shipping.values import ValueReader, ValueWriter, dump, load
from torchslicer.errors import UserError
from torchslicer.graph.model import Ref
from torchslicer.graph.trace import trace
from torchslicer.pipeline.stage import find_routes

ALLOWED = Allowed(["tests.support"])
WORDS = [
    "torch:load",
    "torch.load",
    "builtins:eval",
    "os:system",
    "torch.nn.functional.relu",
    "forward",
    "_forward_hooks",
    "__class__",
    "torch.nn.modules.linear:Linear",
    "torch.nn.modules.rnn:LSTM",
    "embed.weight",
    "head",
    "0",
    "",
    "float32",
    "cuda:0",
    "module",
    "function",
    "constant",
    "parameter",
    "buffer",
    "getattr",
    "builtins.getattr",
    "view",
    "apply_",
    "aten.linear.default",
]
TAGS = [
    "tuple",
    "dict",
    "set",
    "ref",
    "float",
    "dtype",
    "device",
    "function",
    "class",
    "module",
    "tensor",
    "partial",
    "object",
    "enum",
    "named",
    "slice",
    "range",
    "size",
    "bytes",
    "complex",
    "ordered",
    "frozenset",
    "layout",
    "memory_format",
    "ellipsis",
    "type",
]
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 2, 10**6, 2**63, 2**70]),
    st.text(max_size=8),
    st.sampled_from(WORDS),
)
junk = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(TAGS), st.text(max_size=6)), inner, max_size=2),
        st.tuples(st.sampled_from(TAGS), inner).map(lambda pair: {pair[0]: pair[1]}),
    ),
    max_leaves=12,
)
QUIET = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def stage() -> tuple[bytes, dict[str, torch.Tensor]]:
    graph = trace(models.GPT())
    stage_of = [0] * (len(graph.units) // 2) + [1] * (len(graph.units) - len(graph.units) // 2)
    shipped = encode_stage(graph, 1, stage_of, find_routes(graph, stage_of))
    return dump(shipped.description), {name: tensor.clone() for name, tensor in shipped.tensors.items()}


@functools.cache
def module() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return encode_module(nn.Sequential(nn.LSTM(2, 2), nn.TransformerEncoderLayer(2, 1, 2), nn.BatchNorm1d(2)))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be changed in *data*."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [place for key in keys for place in ((*path, key), *places(data[key], (*path, key)))]


@functools.cache
def stage_places() -> list[tuple[Any, ...]]:
    return places(load(stage()[0]))


@functools.cache
def module_places() -> list[tuple[Any, ...]]:
    return places(module()[0])


def change(data: Any, path: tuple[Any, ...], value: Any, how: str) -> None:
    for key in path[:-1]:
        data = data[key]
    if how == "replace":
        data[path[-1]] = value
    elif how == "remove":
        del data[path[-1]]
    elif isinstance(data, list):
        data.append(copy.deepcopy(data[path[-1]]) if how == "repeat" else value)
    elif isinstance(value, str):
        data[value] = data[path[-1]]


CHANGES = st.lists(
    st.tuples(st.integers(0, 10**6), junk, st.sampled_from(["replace", "replace", "remove", "repeat", "add"])),
    min_size=1,
    max_size=3,
)


def changed(data: Any, where: list[tuple[Any, ...]], changes: Any) -> Any:
    for number, value, how in changes:
        try:
            change(data, where[number % len(where)], value, how)
        except (LookupError, TypeError):  # an earlier change has taken the place away
            continue
    return data


def refused(decode: Any, *arguments: Any) -> bool:
    """Whether *decode* refuses its arguments, in a message that one can read."""
    try:
        decode(*arguments)
    except UserError as error:
        return len(str(error)) < 2000 or pytest.fail("the message repeats what was sent")
    return False


@QUIET
@given(CHANGES)
def test_a_stage_with_changes(changes: Any) -> None:
    text, tensors = stage()
    refused(decode_stage, changed(load(text), stage_places(), changes), tensors, ALLOWED)


@QUIET
@given(CHANGES)
def test_a_module_with_changes(changes: Any) -> None:
    description, tensors = module()
    refused(decode_module, changed(copy.deepcopy(description), module_places(), changes), tensors, ALLOWED)


@QUIET
@given(junk)
def test_values(data: Any) -> None:
    refused(ValueReader(), data)
    for decode in (decode_stage, decode_module):
        with pytest.raises(UserError):
            decode(data, {}, ALLOWED)


@QUIET
@given(st.binary(max_size=200))
def test_text(data: bytes) -> None:
    refused(load, data)


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
        st.integers(0, 9).map(Ref),
        st.sampled_from([torch.float16, torch.device("cpu"), torch.channels_last, ..., 1j]),
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(0, 9)), inner),
        st.builds(slice, inner),
    ),
    max_leaves=20,
)


@QUIET
@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    assert ValueReader()(load(dump(ValueWriter()(value)))) == value

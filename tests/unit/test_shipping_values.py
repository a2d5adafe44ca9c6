"""Plain values through JSON and back, and what is refused on the way."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from torchslicer.cluster.shipping.values import (
    MAX_BYTES,
    ValueReader,
    ValueWriter,
    dump,
    flag,
    integer,
    listed,
    load,
    pairs,
    record,
    text,
)
from torchslicer.errors import ShippingError
from torchslicer.graph.model import Ref


def through(value: Any) -> Any:
    return ValueReader()(load(dump(ValueWriter()(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**63),
        "",
        "π \x00 \ud800",
        0.1,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        1 + 2j,
        b"\x00\xff",
        [],
        [1, [2.5]],
        (),
        (1, (2,)),
        {},
        {"a": 1, 2: (3,), None: [], (1, 2): 0},
        OrderedDict(b=1, a=2),
        {1, 2},
        frozenset({"a"}),
        torch.Size([2, 3]),
        torch.float64,
        torch.device("cuda:1"),
        torch.channels_last,
        torch.strided,
        slice(1, None, Ref(3)),
        range(3, 9, 2),
        ...,
        Ref(7),
        int,
        complex,
    ],
)
def test_round_trip(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_what_equality_does_not_see() -> None:
    assert math.isnan(through(math.nan))
    assert math.copysign(1, through(-0.0)) == -1
    assert list(through(OrderedDict(b=1, a=2))) == ["b", "a"]
    assert [type(key) for key in through({1: 0, "1": 0})] == [int, str]


@pytest.mark.parametrize("value", [object(), lambda: 0, np.float64(1), np.int64(1), torch.nn.Linear, 2**65, type])
def test_values_that_are_not_plain(value: Any) -> None:
    with pytest.raises(ShippingError, match="no plain value"):
        ValueWriter()(value)


def test_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ShippingError, match="nested deeper than 64, or contain themselves"):
        ValueWriter()(value)


def nested(depth: int) -> Any:
    data: Any = 0
    for _ in range(depth):
        data = {"tuple": [data]}
    return data


@pytest.mark.parametrize(
    "data",
    [
        1.5,
        {},
        {"a": 1, "b": 2},
        {"unknown": 1},
        {"float": 1.0},
        {"float": "1_0"},
        {"float": "x" * 41},
        {"float": "0x1p99999"},
        {"tuple": 1},
        {"tuple": {"a": 1}},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"set": [[1]]},
        {"size": [-1]},
        {"size": [True]},
        {"slice": [1, 2]},
        {"range": [1, 2, 0]},
        {"range": ["a", 1, 1]},
        {"bytes": "zz"},
        {"bytes": 1},
        {"ref": -1},
        {"ref": "0"},
        {"device": "cuda:999"},
        {"device": "disk"},
        {"device": 0},
        {"dtype": "load"},
        {"dtype": []},
        {"layout": "float32"},
        {"type": "object"},
        {"complex": ["0x1p0"]},
        {1: 2},
        2**70,
        nested(65),
    ],
)
def test_broken_data(data: Any) -> None:
    with pytest.raises(ShippingError):
        ValueReader()(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[1.5]",
        b"[NaN]",
        b"[Infinity]",
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b"9" * 5000,
    ],
)
def test_broken_text(data: bytes) -> None:
    with pytest.raises(ShippingError, match="no JSON that can be used"):
        load(data)


def test_size_limit() -> None:
    with pytest.raises(ShippingError, match="the limit is 16777216"):
        load(b" " * (MAX_BYTES + 1))
    with pytest.raises(ShippingError, match="cut into more stages"):
        dump("a" * MAX_BYTES)


def test_checks_of_parts() -> None:
    assert (listed([1], 1), text("a"), flag(False), integer(3, 0, 3)) == ([1], "a", False, 3)
    assert (record({"a": 1}, ("a",), "x"), pairs([["a", 1]])) == ([1], [("a", 1)])
    with pytest.raises(ShippingError, match="expected a list of 2 items, got one of 1"):
        listed([1], 2)
    with pytest.raises(ShippingError, match="expected a string, got 1"):
        text(1)
    with pytest.raises(ShippingError, match="expected true or false, got 1"):
        flag(1)
    with pytest.raises(ShippingError, match="expected an integer from 0 to 3, got True"):
        integer(True, 0, 3)
    with pytest.raises(ShippingError, match="got a huge integer"):
        integer(10**400)
    with pytest.raises(ShippingError, match=r"x: unknown keys \[\"'b'\"\], missing keys \['a'\]"):
        record({"b": 1}, ("a",), "x")
    with pytest.raises(ShippingError, match="a name is given twice"):
        pairs([["a", 1], ["a", 2]])

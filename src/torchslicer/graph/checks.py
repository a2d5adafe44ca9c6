"""Checks that an exported graph makes of its inputs each time it runs.

`torch.export` records one path through a model. What it took for granted on the way (a size, the value of a flag,
a comparison of sizes) is checked by these functions, which stand in the graph as ordinary nodes.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchslicer.errors import DataError

_BINARY: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.AST], Any] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def check_size(tensor: torch.Tensor, dim: int, size: int, name: str) -> None:
    """Raise unless dimension *dim* of the input called *name* is *size*.

    Raises:
        DataError: It is not, or *tensor* has no such dimension.

    Example:
        >>> check_size(torch.zeros(4, 3), 1, 3, "x")
    """
    if not isinstance(tensor, torch.Tensor):
        raise DataError(f"input '{name}': expected a tensor, as in the example, got {type(tensor).__name__}")
    if dim >= tensor.dim() or tensor.shape[dim] != size:
        raise DataError(
            f"input '{name}': expected size {size} in dimension {dim}, got shape {tuple(tensor.shape)}; torch.export "
            "could not make this dimension dynamic: feed batches of the example's size, or slice with another example"
        )


def check_value(value: Any, expected: Any, name: str) -> None:
    """Raise unless the input called *name*, which is no tensor, is what the graph was recorded with.

    Raises:
        DataError: It is something else.

    Example:
        >>> check_value(True, True, "flag")
    """
    if type(value) is not type(expected) or value != expected:
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise DataError(
            f"input '{name}': expected {expected!r}, got {got}; torch.export fixes inputs that are no tensors to the "
            "example's value: feed the same, or slice with another example"
        )


def unpack(value: Any, keys: tuple[Any, ...] | int, name: str) -> tuple[Any, ...]:
    """Return the items of a nested input: those under *keys* of a dictionary, or all *keys* ones of a sequence.

    Raises:
        DataError: The input called *name* has other items than the example.

    Example:
        >>> unpack({"b": 2, "a": 1}, ("a", "b"), "batch")
        (1, 2)
    """
    if isinstance(keys, int):
        if not isinstance(value, Sequence) or len(value) != keys:
            raise DataError(f"input '{name}': expected {keys} item(s), as in the example, got {_outline(value)}")
        return tuple(value)
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise DataError(f"input '{name}': expected the keys {list(keys)}, as in the example, got {_outline(value)}")
    return tuple(value[key] for key in keys)


def _outline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"the keys {list(value)}"
    return f"{len(value)} item(s)" if isinstance(value, (list, tuple)) else type(value).__name__


def check_relation(relation: str, names: tuple[str, ...], *tensors: torch.Tensor) -> None:
    """Raise unless *relation* holds between the sizes of some inputs.

    Args:
        relation: A comparison of integers in which ``sizes[i][d]`` is dimension ``d`` of the i-th tensor.
        names: What the tensors are called.
        tensors: The inputs.

    Raises:
        DataError: It does not hold.

    Example:
        >>> check_relation("sizes[0][0] == sizes[1][0]", ("x", "y"), torch.zeros(2), torch.ones(2))
    """
    if not evaluate(relation, [tuple(tensor.shape) for tensor in tensors]):
        shapes = ", ".join(f"'{name}' {tuple(t.shape)}" for name, t in zip(names, tensors, strict=True))
        wanted = relation
        for index, name in enumerate(names):
            wanted = wanted.replace(f"sizes[{index}]", f"{name}.shape")
        raise DataError(
            f"inputs of shapes {shapes}: expected {wanted}, as for the example, since the model takes another path "
            "otherwise; feed such batches, or slice with another example"
        )


def evaluate(relation: str, sizes: Sequence[tuple[int, ...]]) -> Any:
    """Return the value of a comparison of integers and *sizes*.

    Raises:
        ValueError: It holds anything but arithmetic, comparisons and ``sizes[i][d]``.

    Example:
        >>> evaluate("sizes[0][0] % 2 == 0 and sizes[0][1] > 1", [(4, 3)])
        True
    """
    return _value(_parsed(relation), sizes)


@functools.lru_cache(maxsize=1024)
def _parsed(relation: str) -> ast.expr:
    return ast.parse(relation, mode="eval").body


def _value(node: ast.expr, sizes: Any) -> Any:
    match node:
        case ast.Constant():
            result = node.value
        case ast.Name(id="sizes"):
            result = sizes
        case ast.Subscript():
            result = _value(node.value, sizes)[_value(node.slice, sizes)]
        case ast.UnaryOp(op=ast.USub()):
            result = -_value(node.operand, sizes)
        case ast.UnaryOp(op=ast.Not()):
            result = not _value(node.operand, sizes)
        case ast.BinOp() if type(node.op) in _BINARY:
            result = _BINARY[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
        case ast.BoolOp():
            values = (_value(item, sizes) for item in node.values)
            result = all(values) if isinstance(node.op, ast.And) else any(values)
        case ast.Compare():
            result = _compared(node, sizes)
        case _:
            raise ValueError(f"cannot evaluate {ast.unparse(node)!r}")
    return result


def _compared(node: ast.Compare, sizes: Any) -> bool:
    values = [_value(item, sizes) for item in (node.left, *node.comparators)]
    pairs = zip(node.ops, values[:-1], values[1:], strict=True)
    return all(type(op) in _COMPARISONS and _COMPARISONS[type(op)](a, b) for op, a, b in pairs)


def hand_on(value: Any) -> Any:
    """Return *value*: stands in a graph where a model returns one of its own tensors as it is.

    Example:
        >>> hand_on(3)
        3
    """
    return value

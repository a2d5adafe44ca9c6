"""Digests of a model's structure: what two sides must agree on before they cut and train the same model."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchslicer.cluster.shipping.allow import is_data_class
from torchslicer.cluster.shipping.functions import listed_name
from torchslicer.cluster.shipping.modules import CONFIG_DROPPED, STANDARD
from torchslicer.graph.fx import tensor_names
from torchslicer.graph.model import ModelGraph, Node

_MAX_DEPTH = 16
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_load_state_dict_pre_hooks",
)  # fmt: skip


def structure_digests(graph: ModelGraph) -> dict[str, str]:
    """Return a digest of each part of a model's structure, by what the part is called in messages.

    In it are operations, units, inputs and outputs; classes of modules and their attributes (numbers, texts and
    containers of them, the values of tensors that are neither parameters nor buffers; of other objects only the
    class); names, shapes and dtypes of parameters and buffers. Values of parameters and buffers are not in it, and
    neither are ``training`` flags.

    Example:
        >>> from torchslicer.graph.trace import trace
        >>> digests = [structure_digests(trace(nn.Sequential(nn.Linear(2, size)))) for size in (3, 3, 4)]
        >>> digests[0] == digests[1]
        True
        >>> first_difference(digests[0], digests[2])
        "module '0' (Linear)"
    """
    return {name: _digest(part) for name, part in _parts(graph)}


def first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """Return the name of the first part that is not the same on both sides, None if all are."""
    return next((name for name in {**there, **here} if here.get(name) != there.get(name)), None)


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16]


def _parts(graph: ModelGraph) -> Iterator[tuple[str, Any]]:
    known = tensor_names(graph.model)
    yield "way in", graph.source
    for path, module in graph.model.named_modules():
        yield f"module '{path}' ({type(module).__name__})", _module(module, known)
    own = {id(module) for module in graph.model.modules()}
    for path, module in graph.modules.items():
        inside = [[name, _module(m, known)] for name, m in module.named_modules() if id(m) not in own]
        yield f"called module '{path}'", [_class_name(module), inside]
    for kind, table in (("parameter", graph.parameters), ("buffer", graph.buffers), ("constant", graph.constants)):
        for name, tensor in table.items():
            yield f"{kind} '{name}'", [str(tensor.dtype), list(tensor.shape)]
        yield f"order of {kind}s", list(table)
    for node in graph.nodes:
        yield f"operation '{node.name}'", _node(node)
    yield "units", [[u.name, u.kind, u.nodes, u.parameters, u.buffers] for u in graph.units]
    yield "inputs", [[entry.name, entry.node] for entry in graph.inputs]
    yield "output", _value(graph.output)


def _class_name(thing: Any) -> str:
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def _module(module: nn.Module, known: Mapping[int, str]) -> Any:
    """Class, attributes and number of hooks of a module, and buffers that are not the model's (of packed stages)."""
    attributes = [
        [name, _value(value)]
        for name, value in sorted(_state(module).items())
        if name not in STANDARD
        and not isinstance(inspect.getattr_static(type(module), name, None), functools.cached_property)
    ]
    hooks = [len(getattr(module, name, None) or ()) for name in _HOOKS]
    tensors = [
        [name, tensor is None] for table in (module._parameters, module._buffers) for name, tensor in table.items()
    ]
    foreign = [_tensor(b) for b in module._buffers.values() if b is not None and id(b) not in known]
    return [_class_name(module), attributes, hooks, tensors, foreign, sorted(module._non_persistent_buffers_set)]


def _state(module: nn.Module) -> Mapping[str, Any]:
    """The attributes of a module; without those of the last call where the library's own class leaves them out."""
    keep = getattr(type(module), "__getstate__", None)
    if keep is not None and getattr(keep, "__module__", None) == "torchslicer.graph.stages":
        return keep(module)  # type: ignore[no-any-return]
    return vars(module)


def _node(node: Node) -> list[Any]:
    target = node.target
    if node.op == "function":
        target = listed_name(target) or f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    ambient = [node.ambient.grad_enabled, str(node.ambient.autocast)]
    return [node.name, node.op, str(target), _value(node.args), _value(dict(node.kwargs)), node.scope, ambient]


def _value(value: Any, depth: int = 0) -> Any:  # noqa: PLR0911 - one case a kind of value
    """Return something for JSON that is the same for equal values and, where that is known, only for them."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind in (float, complex, torch.Size, torch.dtype, torch.device, bytes, range) or isinstance(value, enum.Enum):
        return [kind.__name__, repr(value)]
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return [kind.__name__, [[_value(key, depth + 1), _value(item, depth + 1)] for key, item in value.items()]]
    if isinstance(value, (tuple, list)):
        return [kind.__name__, [_value(item, depth + 1) for item in value]]
    if isinstance(value, (set, frozenset)):
        return [kind.__name__, sorted(json.dumps(_value(item, depth + 1)) for item in value)]
    if isinstance(value, slice):
        return ["slice", [_value(item, depth + 1) for item in (value.start, value.stop, value.step)]]
    if isinstance(value, Tensor):
        return "parameter" if isinstance(value, nn.Parameter) else _tensor(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    return _object(value, depth)


def _object(value: Any, depth: int) -> Any:
    """Describe an object by its class; data and `functools.partial` also by what they hold."""
    name = [_class_name(value), str(getattr(value, "__qualname__", ""))]
    if isinstance(value, functools.partial):
        return [*name, _value((value.func, value.args, value.keywords), depth + 1)]
    if not isinstance(value, type) and is_data_class(type(value)) and hasattr(value, "__dict__"):
        items = sorted((key, item) for key, item in vars(value).items() if key not in CONFIG_DROPPED)
        return [*name, [[key, _value(item, depth + 1)] for key, item in items]]
    return name


def _tensor(tensor: Tensor) -> Any:
    described: list[Any] = [str(tensor.dtype), list(tensor.shape)]
    if tensor.is_meta:
        return [*described, "no values"]
    if tensor.layout is not torch.strided:
        return [*described, str(tensor.layout)]
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [*described, hashlib.sha256(values.numpy().tobytes()).hexdigest()]

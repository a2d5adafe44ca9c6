"""The other way to ship a model: its name. Workers build it themselves and only the tensors of their stage travel.

Nothing of the coordinator's runs: the worker's own list says which builders may be called, and a digest of the
structure makes sure that both sides have cut the same model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.functions import listed_name
from torchslicer.cluster.shipping.names import shorten
from torchslicer.cluster.shipping.values import ValueWriter
from torchslicer.errors import ShippingError
from torchslicer.graph.model import ModelGraph, Node

logger = logging.getLogger("torchslicer.shipping")


def build_from_reference(reference: str, kwargs: Mapping[str, Any], allowed: Allowed) -> nn.Module:
    """Build a model, without memory for its tensors where that is possible.

    Args:
        reference: ``"my_package.models:make"``.
        kwargs: Keyword arguments: what JSON has.
        allowed: What this worker accepts; its ``allow_builders`` decides.

    Raises:
        ShippingError: The builder is not allowed, an argument is no JSON, or what it makes is no module.

    Example:
        >>> build_from_reference("torch.nn.modules.linear:Linear", {"in_features": 2, "out_features": 1}, Allowed())
        Traceback (most recent call last):
        torchslicer.errors.ShippingError: builder 'torch.nn.modules.linear:Linear' is not among the builders ...
    """
    make = allowed.builder(reference)
    if type(kwargs) is not dict or not all(type(key) is str and key.isidentifier() for key in kwargs):
        raise ShippingError(f"builder '{reference}': its arguments are a dictionary with names for keys")
    _check_json(reference, kwargs)
    try:
        with torch.device("meta"):
            model = make(**kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        logger.info("builder '%s' cannot build without memory (%s); building on the CPU", reference, error)
        model = None
    if not isinstance(model, nn.Module) or _needs_values(model):
        model = make(**kwargs)
    if not isinstance(model, nn.Module):
        raise ShippingError(f"builder '{reference}' must return a torch.nn.Module, got a {type(model).__name__}")
    return model


def _check_json(reference: str, value: Any, depth: int = 0) -> None:
    if depth > 16:
        raise ShippingError(f"builder '{reference}': its arguments are nested too deeply")
    if type(value) is dict and all(type(key) is str for key in value):
        value = list(value.values())
    if type(value) is list:
        for item in value:
            _check_json(reference, item, depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ShippingError(f"builder '{reference}': an argument is a {type(value).__name__}; use what JSON has")


def _needs_values(model: nn.Module) -> bool:
    """Whether modules keep tensors that are neither parameters nor buffers: their values would not arrive."""
    return any(
        isinstance(value, Tensor) and value.is_meta for module in model.modules() for value in vars(module).values()
    )


def structure_digest(graph: ModelGraph) -> str:
    """Return a digest of all that two sides must agree on before they cut and train the same model.

    Operations, modules (class names), units, and names, shapes and dtypes of parameters and buffers are in it; values
    are not.

    Example:
        >>> from torchslicer.graph.trace import trace
        >>> digests = [structure_digest(trace(nn.Sequential(nn.Linear(2, size)))) for size in (3, 3, 4)]
        >>> digests[0] == digests[1] != digests[2]
        True
    """
    described = {
        "source": graph.source,
        "modules": [[name, _class_name(module)] for name, module in graph.model.named_modules()],
        "called": [[path, _class_name(module)] for path, module in graph.modules.items()],
        "nodes": [_node_text(node) for node in graph.nodes],
        "units": [[u.name, u.kind, u.nodes, u.parameters, u.buffers] for u in graph.units],
        "inputs": [[entry.name, entry.node] for entry in graph.inputs],
        "output": _argument_text(graph.output),
        "tensors": [
            [name, str(tensor.dtype), list(tensor.shape)]
            for table in (graph.parameters, graph.buffers, graph.constants)
            for name, tensor in table.items()
        ],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}:{type(module).__qualname__}"


def _node_text(node: Node) -> list[Any]:
    target = node.target
    if node.op == "function":
        target = listed_name(target) or f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
    return [node.name, node.op, str(target), _argument_text((node.args, dict(node.kwargs))), node.scope]


def _argument_text(value: Any) -> Any:
    return ValueWriter(lambda inner, _: f"{type(inner).__module__}:{type(inner).__qualname__}")(value)


def check_digest(graph: ModelGraph, expected: str) -> None:
    """Check that the model built here is cut as it is on the other side.

    Raises:
        ShippingError: It differs.
    """
    found = structure_digest(graph)
    if found != expected:
        raise ShippingError(
            f"the model built here has the structure {found[:12]}, the coordinator's has {shorten(expected[:12])}: "
            "install the same versions of its packages on both sides, and give the builder the same arguments"
        )


def load_tensors(graph: ModelGraph, names: Iterable[str], tensors: Mapping[str, Tensor]) -> ModelGraph:
    """Put the tensors that arrived into the model, at every place where a parameter or buffer is used.

    Args:
        graph: The graph of the model that was built here.
        names: Parameters and buffers of the stage.
        tensors: Their values.

    Returns:
        The graph with the new parameters and buffers.

    Raises:
        ShippingError: A tensor is missing, or of another shape or dtype.
    """
    if any(constant.is_meta for constant in graph.constants.values()):
        raise ShippingError("the forward pass uses a tensor that is neither parameter nor buffer; make it a buffer")
    known: dict[str, Tensor] = {**graph.buffers, **graph.parameters}
    new: dict[int, Tensor] = {}
    for name in names:
        if name not in known or name not in tensors:
            raise ShippingError(f"tensor {shorten(name)} is {'missing' if name in known else 'unknown here'}")
        new[id(known[name])] = _fitting(name, known[name], tensors[name])
    for module in {id(m): m for m in (*graph.model.modules(), *_parts(graph))}.values():
        for table in (module._parameters, module._buffers):
            for attribute, tensor in table.items():
                if id(tensor) in new:
                    table[attribute] = new[id(tensor)]  # type: ignore[assignment]
    parameters = {name: new.get(id(p), p) for name, p in graph.parameters.items()}
    buffers = {name: new.get(id(b), b) for name, b in graph.buffers.items()}
    return replace(graph, parameters=parameters, buffers=buffers)  # type: ignore[arg-type]


def _parts(graph: ModelGraph) -> list[nn.Module]:
    return [inner for module in graph.modules.values() for inner in module.modules()]


def _fitting(name: str, old: Tensor, new: Tensor) -> Tensor:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ShippingError(
            f"tensor '{name}': expected {old.dtype} {tuple(old.shape)}, got {new.dtype} {tuple(new.shape)}"
        )
    return nn.Parameter(new.detach(), old.requires_grad) if isinstance(old, nn.Parameter) else new.detach()

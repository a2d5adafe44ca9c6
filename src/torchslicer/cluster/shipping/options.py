"""Optimizer, scheduler and loss of a run as plain data: names and parameters, never objects with code of their own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchslicer.cluster.shipping.allow import Allowed, Importable
from torchslicer.cluster.shipping.modules import ModuleWriter
from torchslicer.cluster.shipping.names import name_of
from torchslicer.cluster.shipping.restore import ModuleReader
from torchslicer.cluster.shipping.tensors import TensorReader, TensorWriter
from torchslicer.cluster.shipping.values import ValueReader, ValueWriter, listed, record, text
from torchslicer.errors import ShippingError
from torchslicer.pipeline.criterion import Criterion, build_criterion
from torchslicer.pipeline.optimizers import (
    OptimizerSpec,
    SchedulerSpec,
    build_optimizer_spec,
    build_scheduler_spec,
)

_KEYS = ("value", "modules", "tensors")
_CALLABLE = (
    'Give it by name ({"name": ..., "params": {...}}), or put the function into a module of a package that the workers '
    "have too and start them with --trust PACKAGE"
)

Shipped = tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]
"""Plain data, tensors, and the modules that the worker must trust."""


def encode_optimizer(spec: Any) -> Shipped:
    """Write an optimizer as a user may give it, or as `build_optimizer_spec` made it.

    Raises:
        ShippingError: It holds a function that a worker could not find by name.
        ConfigError: It is no optimizer.

    Example:
        >>> description, _, _ = encode_optimizer({"name": "sgd", "params": {"lr": 0.5}})
        >>> decode_optimizer(description, {}, Allowed()).name
        'SGD'
    """
    built = build_optimizer_spec(spec)
    params = _keywords(built.factory)
    if built.groups:
        params["groups"] = [{**group.options, "match": list(group.patterns)} for group in built.groups]
    return _write({"name": _innermost(built.factory), "params": params}, f"optimizer {built.name}")


def decode_optimizer(description: Any, tensors: Mapping[str, Tensor], allowed: Allowed) -> OptimizerSpec:
    """Build the optimizer that `encode_optimizer` wrote.

    Raises:
        ShippingError: The description is broken, or names what this worker does not accept.
        ConfigError: A name, parameter or value is impossible.
    """
    return build_optimizer_spec(_read(description, tensors, allowed))


def encode_scheduler(spec: SchedulerSpec | None) -> Shipped:
    """Write a scheduler, as `build_scheduler_spec` made it.

    Raises:
        ShippingError: It holds a function that a worker could not find by name.
    """
    if spec is None:
        return _write(None, "scheduler")
    plain: dict[str, Any] = {"name": spec.factory, "params": {}}
    if isinstance(spec.factory, functools.partial):
        if spec.factory.args:
            plain["name"], params = spec.factory.args[:2]
            plain["params"] = dict(params)
        else:
            plain = {"name": _innermost(spec.factory), "params": _keywords(spec.factory)}
    plain["interval"] = spec.interval
    if spec.name == "ReduceLROnPlateau":
        plain["monitor"] = spec.monitor
    return _write(plain, f"scheduler {spec.name}")


def decode_scheduler(
    description: Any, tensors: Mapping[str, Tensor], allowed: Allowed, *, optimizer: OptimizerSpec | None = None
) -> SchedulerSpec | None:
    """Build the scheduler that `encode_scheduler` wrote; it is tried on *optimizer*.

    Raises:
        ShippingError: The description is broken, or names what this worker does not accept.
        ConfigError: A name, parameter or value is impossible.
    """
    return build_scheduler_spec(_read(description, tensors, allowed), optimizer=optimizer)


def encode_criterion(criterion: Criterion) -> Shipped:
    """Write a loss, as `build_criterion` made it.

    Raises:
        ShippingError: It is, or holds, a function that a worker could not find by name.

    Example:
        >>> description, tensors, _ = encode_criterion(build_criterion("cross_entropy"))
        >>> decode_criterion(description, tensors, Allowed()).name
        'CrossEntropyLoss'
    """
    function = criterion.function
    made = {"name": criterion.name, "reduction": criterion.reduction, "function": function, "keywords": {}}
    if isinstance(function, functools.partial):
        made |= {"function": _innermost(function), "keywords": _keywords(function)}
    return _write(made, f"criterion {criterion.name}")


def decode_criterion(description: Any, tensors: Mapping[str, Tensor], allowed: Allowed) -> Criterion:
    """Build the loss that `encode_criterion` wrote.

    Raises:
        ShippingError: The description is broken, or names what this worker does not accept.
        ConfigError: It is no loss.
    """
    made = _read(description, tensors, allowed)
    name, reduction, function, keywords = record(made, ("name", "reduction", "function", "keywords"), "criterion")
    if type(keywords) is not dict or not all(type(key) is str for key in keywords):
        raise ShippingError("the keywords of a criterion are a dictionary with strings for keys")
    if reduction not in ("mean", "sum", "batchmean") or not callable(function):
        raise ShippingError("a criterion is a function with one of the reductions mean, sum and batchmean")
    if isinstance(function, nn.Module):
        build_criterion(function)  # refuses what has parameters to train
    return Criterion(text(name), functools.partial(function, **keywords) if keywords else function, reduction)


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        if function.args:
            raise ShippingError(f"functools.partial with positional arguments cannot be shipped. {_CALLABLE}")
        function = function.func
    return function


def _keywords(function: Any) -> dict[str, Any]:
    if not isinstance(function, functools.partial):
        return {}
    return {**_keywords(function.func), **function.keywords}


def _write(value: Any, what: str) -> Shipped:
    allowed = Importable()
    tensors = TensorWriter({})
    modules = ModuleWriter(tensors, allowed)
    other = modules.value._other

    def write_other(inner: Any, write: Callable[[Any], Any]) -> Any:
        if isinstance(inner, type) and inner.__module__.startswith("torch.optim."):
            return write(inner.__name__)
        if isinstance(inner, (type, types.FunctionType)) and not _is_torch(inner):
            allowed.factory(name := name_of(inner))
            return {"factory": name}
        assert other is not None
        return other(inner, write)

    modules.value = ValueWriter(write_other)
    try:
        written = modules.value(value)
    except ShippingError as error:
        raise ShippingError(f"{what}: {error}. {_CALLABLE}") from error
    description = {"value": written, "modules": modules.records, "tensors": tensors.entries}
    return description, tensors.tensors, tuple(sorted(allowed.required))


def _is_torch(thing: Any) -> bool:
    return str(thing.__module__).split(".", maxsplit=1)[0] == "torch"


def _read(description: Any, tensors: Mapping[str, Tensor], allowed: Allowed) -> Any:
    value, records, entries = record(description, _KEYS, "options")
    reader = TensorReader(entries, tensors)
    modules = ModuleReader(listed(records), reader, allowed)
    other = modules.value._other

    def read_other(tag: str, body: Any, read: Callable[[Any], Any]) -> Any:
        if tag == "factory":
            return allowed.factory(body)
        assert other is not None
        return other(tag, body, read)

    return ValueReader(read_other)(value)

"""A `torch.fx` tracer that keeps modules whole and loses nothing.

Beyond the stock tracer it records under which contexts a node was issued (``no_grad``, autocast), records custom
autograd functions and random factories as nodes, keeps a submodule that cannot be traced as one node, and leaves
the traced model exactly as it found it.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from torchslicer.errors import SliceError, TraceError
from torchslicer.graph.attributes import AttributeSnapshot, own_copy
from torchslicer.graph.generators import EXCLUSIVE
from torchslicer.graph.model import Ambient

_DESCENDED = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
_RANDOM_FACTORIES = ("rand", "randn", "randint", "randperm", "normal")
_AUTOCAST_DEVICES = ("cpu", "cuda")
_TRACING = threading.RLock()
"""A trace replaces methods of torch for all threads, so there is one at a time."""


class HiddenStateError(TraceError):
    """The record of a forward pass would hold for one call only."""


class _Proxy(fx.Proxy):
    """Stands in for a value; what is set on it would be lost (``weight.data = ...``)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {"tracer", "node"}:
            raise TraceError(f"forward sets the attribute '{name}' of a tensor")
        super().__setattr__(name, value)


class WholeModuleTracer(fx.Tracer):
    """Trace a model for the inputs named *given*; the other optional inputs keep their defaults.

    After `trace`, ``kept_whole`` maps the path of every submodule that could not be traced to the reason, and
    ``constants`` holds the tensors that the forward pass uses without their being parameters or buffers.
    """

    proxy_buffer_attributes = True

    def __init__(self, given: Sequence[str]) -> None:
        super().__init__()
        self.given = tuple(given)
        self.kept_whole: dict[str, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.input_names: dict[str, str] = {}
        self._scopes: list[str] = [""]
        self._thread = threading.get_ident()
        self._tensor_paths: dict[int, str] = {}

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:  # type: ignore[override]
        """Record the forward pass of *root*; `TraceError` if that is not possible."""
        self._thread = threading.get_ident()
        self._tensor_paths = {id(tensor): name for name, tensor in _named_tensors(root)}
        self._outer_autocast = _autocast_state()
        with _TRACING, EXCLUSIVE, torch.enable_grad(), _unchanged(root), self._recorded_calls():
            return super().trace(root, concrete_args)

    def create_args_for_root(
        self,
        root_fn: Any,
        is_module: bool,  # noqa: ARG002 - the signature is fx's
        concrete_args: Any = None,  # noqa: ARG002
    ) -> tuple[Callable[[], Any], list[Any]]:
        """Make a placeholder for each given input, and call the forward pass by keyword where it wants that."""
        args: list[Any] = [self.root]
        kwargs: dict[str, Any] = {}
        for parameter in list(inspect.signature(root_fn).parameters.values())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            value = self._input(parameter)
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return lambda: self._repeatable(self.root, lambda: root_fn(*args, **kwargs)), []

    def _input(self, parameter: inspect.Parameter) -> Any:
        if parameter.name not in self.given:
            return own_copy(parameter.default)
        proxy = self.create_proxy("placeholder", parameter.name, (), {})
        self.input_names[proxy.node.name] = parameter.name
        return proxy

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """A module of ``torch.nn`` that is no mere container, a compiled or scripted one, or one with hooks."""
        if isinstance(m, (torch.jit.ScriptModule, nn.DataParallel)) or _has_hooks(m):
            return True
        if type(m).__module__.startswith("torch._dynamo"):
            return True
        return type(m).__module__.startswith("torch.nn") and type(m) not in _DESCENDED

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Descend into *m*; where its forward pass cannot be traced, keep it whole."""
        if self._is_elsewhere():
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if path in self.kept_whole or self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        last = self._last_node()
        self._scopes.append(path)
        try:
            return self._repeatable(m, lambda: forward(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - user code that meets a proxy may raise anything; the reason is kept
            self._forget(self._nodes_after(last))
            self.kept_whole[path] = f"{type(m).__name__}: {_reason(error)}"
        finally:
            self._scopes.pop()
        return self.create_proxy("call_module", path, args, kwargs)

    def _last_node(self) -> fx.Node | None:
        return next(reversed(self.graph.nodes), None)

    def _nodes_after(self, last: fx.Node | None) -> list[fx.Node]:
        nodes = list(self.graph.nodes)
        return nodes if last is None else nodes[nodes.index(last) + 1 :]

    def _forget(self, nodes: Sequence[fx.Node]) -> None:
        for node in reversed(nodes):
            self.graph.erase_node(node)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Stand in for parameters and buffers, in the thread that traces."""
        return attr_val if self._is_elsewhere() else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def _repeatable(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Run *call*, the forward pass of *module*, and make sure that its record does not hold for this call only.

        Raises:
            HiddenStateError: It drew random numbers or chose its way by them, or it keeps state in an attribute.
        """
        before, last = AttributeSnapshot.take([module]), self._last_node()
        with _unmoved_generators() as moved:
            result = call()
            whose = moved()
        if whose:
            kind = TraceError if whose == "torch" else HiddenStateError
            raise kind(f"{type(module).__name__}.forward draws random numbers ({whose}) that would become constants")
        changed = before.changed()
        if changed:
            self._refuse_state(module, changed, call, last)
        return result

    def _refuse_state(self, module: nn.Module, changed: list[str], call: Callable[[], Any], last: Any) -> None:
        """Call again: if the record is another one, the forward pass depends on what the call before left."""
        first = self._nodes_after(last)
        after = AttributeSnapshot.take([module])
        with _unmoved_generators():
            call()
        second = self._nodes_after(first[-1] if first else last)
        same = _outline(first, self.constants) == _outline(second, self.constants)
        self._forget(second)
        after.restore()
        if not same:
            raise HiddenStateError(
                f"{type(module).__name__}.forward keeps state from call to call in {', '.join(map(repr, changed))}; "
                "keep it in a registered buffer that is changed in place"
            )

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Make the stand-in for what *node* will make."""
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node that remembers which module issued it and under which contexts."""
        node = super().create_node(*args, **kwargs)
        node.meta["scope"] = self._scopes[-1]
        node.meta["ambient"] = self._ambient()
        return node

    def _ambient(self) -> Ambient:
        for now, outer in zip(_autocast_state(), self._outer_autocast, strict=True):
            if now != outer:
                return Ambient(torch.is_grad_enabled(), now)
        return Ambient(torch.is_grad_enabled())

    def create_arg(self, a: Any) -> Any:
        """Turn tensors met on the way into named sources instead of attributes set on the user's model."""
        if isinstance(a, torch.Tensor):
            return self.create_node("get_attr", self._name_of(a), (), {})
        if callable(a) and not isinstance(a, (type, fx.Proxy)) and not hasattr(a, "_fields"):
            raise TraceError(f"a function ({getattr(a, '__qualname__', a)!r}) is passed to an operation")
        return super().create_arg(a)

    def _name_of(self, tensor: torch.Tensor) -> str:
        if id(tensor) in self._tensor_paths:
            return self._tensor_paths[id(tensor)]
        if tensor.grad_fn is not None:
            raise TraceError("a tensor was computed from parameters outside the traced operations")
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = tensor
        self._tensor_paths[id(tensor)] = name
        return name

    @contextlib.contextmanager
    def _recorded_calls(self) -> Iterator[None]:
        """Record calls that fx looks through (custom autograd functions) or executes (random factories)."""
        # torch remembers its functions when it first needs them: not the recorders, which would keep the model.
        torch.overrides.get_overridable_functions()
        stock_apply = vars(torch.autograd.Function)["apply"]
        factories = {name: getattr(torch, name) for name in _RANDOM_FACTORIES}
        torch.autograd.Function.apply = classmethod(self._apply_recorder(stock_apply))  # type: ignore[assignment]
        for name, factory in factories.items():
            setattr(torch, name, self._factory_recorder(factory))
        try:
            yield
        finally:
            torch.autograd.Function.apply = stock_apply  # type: ignore[method-assign]
            for name, factory in factories.items():
                setattr(torch, name, factory)

    def _apply_recorder(self, stock: Any) -> Callable[..., Any]:
        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            call = stock.__get__(None, cls)
            if any(isinstance(arg, fx.Proxy) for arg in (*args, *kwargs.values())):
                return self.create_proxy("call_function", call, args, kwargs)
            return call(*args, **kwargs)

        return apply

    def _factory_recorder(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if self._is_elsewhere():
                return factory(*args, **kwargs)
            return self.create_proxy("call_function", factory, args, kwargs)

        return record


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from root.named_parameters()
    yield from root.named_buffers()


def _has_hooks(module: nn.Module) -> bool:
    return any(
        getattr(module, name, None)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def _autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES
    )


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"[:200]


@contextlib.contextmanager
def _unchanged(root: nn.Module) -> Iterator[None]:
    """Undo what a traced forward pass did to attributes; refuse one that hides a loss in an attribute."""
    before = AttributeSnapshot.take(root.modules())
    try:
        yield
        for path, module in root.named_modules():
            _refuse_hidden_loss(path, vars(module), before.attributes.get(module, {}))
    finally:
        before.restore()


@contextlib.contextmanager
def _unmoved_generators() -> Iterator[Callable[[], str]]:
    """Put the global random generators back afterwards; what is yielded names one that has moved, if any."""
    python, other, own = random.getstate(), _numpy_state(), torch.default_generator.get_state()

    def moved() -> str:
        numbers = _numpy_state()
        if random.getstate() != python:
            return "random"
        if numbers[2] != other[2] or not np.array_equal(numbers[1], other[1]):
            return "numpy"
        return "" if torch.equal(torch.default_generator.get_state(), own) else "torch"

    try:
        yield moved
    finally:
        random.setstate(python)
        np.random.set_state(other)  # noqa: NPY002 - the global one
        torch.default_generator.set_state(own)


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002 - the global one is what models draw from


def _outline(nodes: Sequence[fx.Node], constants: Mapping[str, torch.Tensor]) -> list[Any]:
    """What *nodes* do, in a form that two records of the same operations share."""
    number = {node: index for index, node in enumerate(nodes)}

    def place(node: fx.Node) -> Any:
        return f"inside {number[node]}" if node in number else f"outside {node.name}"

    def target(node: fx.Node) -> Any:
        constant = constants.get(str(node.target))
        return node.target if constant is None else constant.tolist()

    return [(n.op, target(n), repr(fx.node.map_arg((n.args, n.kwargs), place)), n.meta["ambient"]) for n in nodes]


def _refuse_hidden_loss(path: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in now.items():
        if isinstance(value, fx.Proxy) and value is not before.get(name) and "loss" in name.lower():
            raise SliceError(
                f"module '{path or '(model)'}' stores a loss in its attribute '{name}' during forward; a loss kept "
                "there would not be trained on once the model is cut. Hand it over with "
                "torchslicer.add_aux_loss(value, weight) inside forward, or return it."
            )

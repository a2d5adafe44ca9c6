"""From a `torch.fx` trace to a `ModelGraph`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from torchslicer.errors import SliceError, TraceError
from torchslicer.graph.checks import hand_on
from torchslicer.graph.model import SOURCES, GraphInput, ModelGraph, Node, Ref, iter_refs, map_refs
from torchslicer.graph.tracer import WholeModuleTracer
from torchslicer.graph.units import form_units

_OPS = {"call_module": "module", "call_function": "function", "call_method": "method", "placeholder": "input"}


def trace_fx(model: nn.Module, given: Sequence[str]) -> ModelGraph:
    """Trace *model* with `torch.fx` for the inputs named *given*.

    Raises:
        TraceError: The forward pass of the model itself cannot be traced.
    """
    _check_forward(model)
    tracer = WholeModuleTracer(given)
    try:
        graph = tracer.trace(model)
    except SliceError:
        raise
    except Exception as error:  # user code that meets a proxy may raise anything; the reason is passed on
        raise TraceError(f"torch.fx: {type(error).__name__}: {error}{_where(error, model)}") from error
    return _Converter(model, tracer, graph).convert()


def input_names(model: nn.Module) -> tuple[str, ...]:
    """Names of all inputs of *model*'s forward pass, ``*args`` and ``**kwargs`` left out."""
    return tuple(p.name for p in _parameters(model))


def required_inputs(model: nn.Module) -> tuple[str, ...]:
    """Names of the inputs of *model*'s forward pass that have no default."""
    return tuple(p.name for p in _parameters(model) if p.default is p.empty)


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except ValueError as error:  # a traced TorchScript module
        raise SliceError(
            f"the inputs of {type(model).__name__} cannot be read from its forward pass; put it into a module of your "
            "own whose forward names them"
        ) from error
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def tensor_names(model: nn.Module) -> dict[int, str]:
    """Identity of each parameter and buffer to its qualified name (the first, where there are several)."""
    return {id(t): name for name, t in [*model.named_buffers(), *model.named_parameters()]}


def _check_forward(model: nn.Module) -> None:
    if "forward" in vars(model):
        raise TraceError("torch.fx: the model's forward was replaced on the instance")
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        if getattr(model, hooks, None):
            raise TraceError(
                f"torch.fx: the model itself has {hooks.strip('_').replace('_', ' ')}; put them on a submodule"
            )


def _where(error: BaseException, model: nn.Module) -> str:
    """The line of the model's own code that could not be traced."""
    trace = error.__traceback__
    place = ""
    code = getattr(type(model).forward, "__code__", None)
    model_file = None if code is None else code.co_filename
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == model_file:
            place = f" (in {trace.tb_frame.f_code.co_name}, line {trace.tb_lineno} of {model_file})"
        trace = trace.tb_next
    return place


class _Converter:
    """Turns one fx graph into nodes, and the nodes into units."""

    def __init__(self, model: nn.Module, tracer: WholeModuleTracer, graph: fx.Graph) -> None:
        self.model = model
        self.tracer = tracer
        self.graph = graph
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.index: dict[fx.Node, int] = {}
        self.modules: dict[str, nn.Module] = {}

    def convert(self) -> ModelGraph:
        body = [node for node in self.graph.nodes if node.op != "output"]
        self.index = {node: index for index, node in enumerate(body)}
        traced = [self._node(node) for node in body]
        output = next(node for node in self.graph.nodes if node.op == "output")
        nodes, output = _with_own_outputs(traced, self._argument(output.args[0]))
        return ModelGraph(
            source="sequential" if type(self.model) is nn.Sequential else "fx",
            model=self.model,
            modules=self.modules,
            parameters=self.parameters,
            buffers=self.buffers,
            constants=self.tracer.constants,
            nodes=nodes,
            units=form_units(nodes, self.modules, tensor_names(self.model), self._kind),
            inputs=tuple(GraphInput(n.target, n.index) for n in nodes if n.op == "input"),
            output=output,
            attempts=tuple(f"kept whole: {path}: {why}" for path, why in self.tracer.kept_whole.items()),
        )

    def _kind(self, path: str) -> str:
        return "opaque" if path in self.tracer.kept_whole else "module"

    def _node(self, node: fx.Node) -> Node:
        op = self._source(node) if node.op == "get_attr" else _OPS[node.op]
        target = self.tracer.input_names[node.name] if op == "input" else node.target
        if op == "module":
            self.modules[str(target)] = self.model.get_submodule(str(target))
        return Node(
            index=self.index[node],
            name=node.name,
            op=op,  # type: ignore[arg-type]
            target=target,
            args=() if op == "input" else self._argument(tuple(node.args)),
            kwargs=self._argument(dict(node.kwargs)),
            scope=node.meta["scope"],
            ambient=node.meta["ambient"],
        )

    def _source(self, node: fx.Node) -> str:
        if node.target in self.parameters:
            return "parameter"
        return "buffer" if node.target in self.buffers else "constant"

    def _argument(self, value: Any) -> Any:  # noqa: PLR0911 - one case a kind of container
        """Replace fx nodes by `Ref` and fx's immutable collections by plain ones."""
        if isinstance(value, fx.Node):
            return Ref(self.index[value])
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple):
            items = [self._argument(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(item) for item in (value.start, value.stop, value.step)))
        return value


def _with_own_outputs(nodes: Sequence[Node], output: Any) -> tuple[tuple[Node, ...], Any]:
    """Let an operation hand on a tensor of the model that is an output as it is, so that this is a use like others."""
    made = list(nodes)
    handed: dict[int, Ref] = {}
    for index in dict.fromkeys(ref.index for ref in iter_refs(output)):
        if nodes[index].op in SOURCES:
            handed[index] = Ref(len(made))
            made.append(Node(len(made), f"output_{nodes[index].name}", "function", hand_on, (Ref(index),)))
    return tuple(made), map_refs(output, lambda ref: handed.get(ref.index, ref))

"""How a model becomes a graph: the ways in, in order; the first that succeeds wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchslicer.errors import TraceError
from torchslicer.graph.fx import input_names, required_inputs, tensor_names, trace_fx
from torchslicer.graph.model import GraphInput, ModelGraph, Node, Ref, Unit
from torchslicer.graph.pack import Pack, trace_pack
from torchslicer.graph.tracer import HiddenStateError


def trace(
    model: nn.Module,
    *,
    pack: Pack | None = None,
    example: Mapping[str, Any] | None = None,
    given: Sequence[str] | None = None,
    skip_fx: str = "",
) -> ModelGraph:
    """Return the graph of *model*: from *pack*, else by `torch.fx`, else by `torch.export`, else as one whole unit.

    Args:
        model: The model, in the mode (training flags) that the graph is for.
        pack: The user's own list of stages.
        example: Inputs by name, for `torch.export`.
        given: Names of the inputs that batches hold; by default those of *example*, else the required ones.
        skip_fx: Why `torch.fx` is not to be tried (its graph was found to differ from the model).
    """
    names = tuple(given) if given is not None else tuple(example) if example is not None else None
    if pack is not None:
        return trace_pack(model, pack, names)
    attempts = [f"torch.fx: {skip_fx}"] if skip_fx else []
    try:
        if not skip_fx:
            return trace_fx(model, names if names is not None else required_inputs(model))
    except HiddenStateError as error:  # an export would record that one call just as well
        return whole(model, names, [*attempts, f"torch.fx: {error}"])
    except TraceError as error:
        attempts.append(str(error))
    if example is None:
        attempts.append("torch.export: needs example inputs: pass example=(x, y) or example={...} to ts.slice")
    else:
        from torchslicer.graph.export import trace_export  # noqa: PLC0415 - slow to import, rarely needed

        try:
            return trace_export(model, example)
        except TraceError as error:
            attempts.append(str(error))
    return whole(model, names, attempts)


def whole(model: nn.Module, given: Sequence[str] | None, attempts: Sequence[str]) -> ModelGraph:
    """Return a graph of a single unit: the model itself. It can be trained, but not cut."""
    names = tensor_names(model)
    inputs = tuple(given) if given is not None else required_inputs(model)
    order = [name for name in input_names(model) if name in inputs]
    nodes = [Node(index, name, "input", name) for index, name in enumerate(order)]
    kwargs = {name: Ref(index) for index, name in enumerate(order)}
    nodes.append(Node(len(nodes), "model", "module", "", (), kwargs))
    unit = Unit(
        0,
        "(model)",
        "opaque",
        (len(nodes) - 1,),
        tuple(dict.fromkeys(names[id(p)] for p in model.parameters())),
        tuple(dict.fromkeys(names[id(b)] for b in model.buffers())),
    )
    return ModelGraph(
        source="whole",
        model=model,
        modules={"": model},
        parameters=dict(model.named_parameters()),
        buffers=dict(model.named_buffers()),
        constants={},
        nodes=tuple(nodes),
        units=(unit,),
        inputs=tuple(GraphInput(name, index) for index, name in enumerate(order)),
        output=Ref(len(nodes) - 1),
        attempts=tuple(attempts),
    )

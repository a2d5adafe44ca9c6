"""Compare a graph with the model it came from, on one batch: outputs and, while training, every gradient.

Both run with the same random numbers in the same order, on copies of the buffers; nothing of the model, of its
gradients or of the caller's random state is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchslicer.errors import DataError, StageError, UserError, VerificationError
from torchslicer.graph.auxloss import collect_aux_losses
from torchslicer.graph.model import SOURCES, ModelGraph, iter_refs, map_refs
from torchslicer.pipeline.batch import describe
from torchslicer.pipeline.interpreter import Program, default_call
from torchslicer.pipeline.untouched import own_inputs, seed_all, untouched

_REMEDY = (
    "give a pack function (pack=), make the part that differs a submodule that cannot be traced, or pass verify=False "
    "if the difference is meant"
)


def verify(graph: ModelGraph, inputs: Mapping[str, Any], *, gradients: bool) -> None:
    """Raise if *graph* and its model differ on *inputs*.

    Raises:
        VerificationError: An output or a gradient differs; the message says which and by how much.
        DataError: The model itself fails on *inputs*.
    """
    expected = _run(graph.model, lambda: _run_model(graph.model, inputs), gradients=gradients)
    try:
        found = _run(graph.model, lambda: run_whole(graph, inputs), gradients=gradients)
    except StageError as error:
        raise VerificationError(
            f"the graph ({graph.source}) fails where the model does not: {error}; {_REMEDY}"
        ) from error
    _compare(graph, expected[0], found[0], [f"output {index}" for index in range(len(expected[0]))])
    names = [name for name, parameter in graph.parameters.items() if parameter.requires_grad]
    _compare(graph, expected[1], found[1], [f"the gradient of '{name}'" for name in names] if gradients else [])


def run_whole(graph: ModelGraph, inputs: Mapping[str, Any]) -> Any:
    """Run all units of *graph* in one go and return what the model would return."""
    inputs = own_inputs(inputs)
    environment = {entry.node: inputs[entry.name] for entry in graph.inputs}
    refs = {ref.index for ref in iter_refs(graph.output)}
    Program(graph, range(len(graph.units)), keep=refs).run(environment)
    for index in refs:
        if graph.nodes[index].op in SOURCES:
            environment[index] = default_call(graph, graph.nodes[index])()
    return map_refs(graph.output, lambda ref: environment[ref.index])


def _run_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        return model(**own_inputs(inputs))
    except UserError:
        raise
    except Exception as error:  # whatever the user's model raises goes on with the batch that it raised on
        raise DataError(
            f"{type(model).__name__} itself fails on this batch: {type(error).__name__}: {error} "
            f"(inputs: {', '.join(f'{name}: {describe(value)}' for name, value in inputs.items())})"
        ) from error


def _run(model: nn.Module, call: Callable[[], Any], *, gradients: bool) -> tuple[list[Any], list[Any]]:
    with untouched(model), torch.set_grad_enabled(gradients), collect_aux_losses():
        seed_all(0)
        outputs = pytree.tree_leaves(_plain(call()))
        outputs = [leaf for leaf in outputs if leaf is not None]
        return [_detached(leaf) for leaf in outputs], _gradients(model, outputs) if gradients else []


def _plain(output: Any) -> Any:
    """Turn objects that behave like dictionaries or hold fields into plain ones, so that their tensors are seen."""
    if isinstance(output, Mapping):
        return {key: _plain(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [_plain(value) for value in output]
    return output


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _gradients(model: nn.Module, outputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """Gradients of a weighted sum of all outputs; the weights keep a gradient from cancelling out."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wanted = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not wanted or not parameters:
        return [None] * len(parameters)
    weights = [
        torch.linspace(0.5, 1.5, leaf.numel(), device=leaf.device).to(leaf.dtype).view(leaf.shape) for leaf in wanted
    ]
    return list(torch.autograd.grad(wanted, parameters, weights, allow_unused=True))


def _compare(graph: ModelGraph, expected: Sequence[Any], found: Sequence[Any], names: Sequence[str]) -> None:
    if len(expected) != len(found):
        raise VerificationError(
            f"the graph ({graph.source}) gives {len(found)} output(s), the model {len(expected)}; {_REMEDY}"
        )
    for name, a, b in zip(names, expected, found, strict=False):
        difference = _difference(a, b)
        if difference is not None:
            raise VerificationError(
                f"{name} of the graph ({graph.source}) differs from the model's: {difference}; {_REMEDY}"
            )


def _difference(a: Any, b: Any) -> str | None:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        same = a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)
        return None if same else f"{_kind(b)} instead of {_kind(a)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{b.dtype} {tuple(b.shape)} instead of {a.dtype} {tuple(a.shape)}"
    if a.layout != torch.strided or b.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(a, b) or (_is_inexact(a) and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    return f"by up to {(a.to(wide) - b.to(wide)).abs().max().item():.3g}"


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)[:60]

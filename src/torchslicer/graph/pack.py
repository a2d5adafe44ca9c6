"""A graph from the user's own list of stages: the word of the user, taken as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from torch import nn

from torchslicer.errors import SliceError
from torchslicer.graph.fx import tensor_names
from torchslicer.graph.model import GraphInput, ModelGraph, Node, Ref, Unit

Pack = Callable[[nn.Module], Sequence[nn.Module]]


def trace_pack(model: nn.Module, pack: Pack, given: Sequence[str] | None = None) -> ModelGraph:
    """Return the graph of a chain of packed stages.

    Each stage takes what the one before it returns; the first takes the model's main input. A stage that takes named
    inputs of its own (`AuxInputStage`, or any stage with keyword-only parameters) gets those that *given* names.

    Args:
        model: The model that is packed.
        pack: Returns its stages.
        given: Names of the inputs that batches hold; None if not known yet.

    Raises:
        SliceError: *pack* does not return modules.
    """
    stages = _stages(model, pack)
    names = tensor_names(model)
    inputs = packed_inputs(stages, given)
    nodes = [Node(index, name, "input", name) for index, name in enumerate(inputs)]
    modules: dict[str, nn.Module] = {}
    units: list[Unit] = []
    main = Ref(0)
    for number, stage in enumerate(stages):
        path = f"stage{number}.{type(stage).__name__}"
        modules[path] = stage
        side = {name: Ref(inputs.index(name)) for name in inputs[1:] if _takes(stage, name)}
        nodes.append(Node(len(nodes), path.replace(".", "_"), "module", path, (main,), side))
        units.append(_unit(number, path, stage, len(nodes) - 1, names))
        main = Ref(len(nodes) - 1)
    _refuse_foreign_tensors(model, stages, names)
    return ModelGraph(
        source="pack",
        model=model,
        modules=modules,
        parameters=dict(model.named_parameters()),
        buffers=dict(model.named_buffers()),
        constants={},
        nodes=tuple(nodes),
        units=tuple(units),
        inputs=tuple(GraphInput(name, index) for index, name in enumerate(inputs)),
        output=main,
    )


def packed_inputs(stages: Sequence[nn.Module], given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the inputs: the first stage's main one, then the named ones that any stage takes."""
    main = _main_input(stages[0])
    if given is None:
        return (main, *dict.fromkeys(name for stage in stages for name in _required_names(stage)))
    first = main if main in given else given[0]
    return (first, *(name for name in given if name != first and any(_takes(stage, name) for stage in stages)))


def _stages(model: nn.Module, pack: Pack) -> list[nn.Module]:
    stages = pack(model)
    if not isinstance(stages, (list, tuple, nn.ModuleList, nn.Sequential)) or not len(stages):
        raise SliceError(f"pack must return a list of modules, got {type(stages).__name__}")
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise SliceError(f"pack must return a list of modules; item {number} is a {type(stage).__name__}")
    return list(stages)


def _main_input(stage: nn.Module) -> str:
    for parameter in inspect.signature(stage.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return parameter.name
    return "input"


def _required_names(stage: nn.Module) -> list[str]:
    parameters = inspect.signature(stage.forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]


def _takes(stage: nn.Module, name: str) -> bool:
    parameters = list(inspect.signature(stage.forward).parameters.values())
    named = {p.name for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return name in named or (getattr(stage, "accepts_aux_inputs", False) and _is_variadic(parameters))


def _is_variadic(parameters: Sequence[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _unit(number: int, path: str, stage: nn.Module, node: int, names: dict[int, str]) -> Unit:
    parameters = tuple(dict.fromkeys(names[id(p)] for p in stage.parameters() if id(p) in names))
    buffers = tuple(dict.fromkeys(names[id(b)] for b in stage.buffers() if id(b) in names))
    return Unit(number, path, "packed", (node,), parameters, buffers)


def _refuse_foreign_tensors(model: nn.Module, stages: Sequence[nn.Module], names: dict[int, str]) -> None:
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if id(parameter) not in names:
                raise SliceError(
                    f"packed stage {number} ({type(stage).__name__}) has the parameter '{name}', which is not one of "
                    f"{type(model).__name__}'s; build stages from the model's own modules, without copies"
                )

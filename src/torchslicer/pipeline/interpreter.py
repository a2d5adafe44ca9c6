"""Run the nodes of a graph, one after the other: the only way in which a stage computes.

No code is generated, so the same small loop serves every kind of graph, knows which unit it is in (for the random
numbers), and runs each node under the contexts that it was recorded under.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchslicer.errors import StageError, UserError
from torchslicer.graph.model import DEFAULT_AMBIENT, SOURCES, Ambient, ModelGraph, Node, Ref, map_refs
from torchslicer.pipeline.draws import may_draw

Environment = dict[int, Any]
"""What each node has made, by node index."""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Instruction:
    """A node ready to run.

    ``call`` is called with the arguments; ``plain`` lists the argument nodes when all are plain references and
    there are no keywords (the common and quick case); ``frees`` are nodes used here for the last time; ``ambient`` is
    None where the node runs as its caller does; ``seeds`` says whether the random numbers of its unit begin here.
    """

    node: Node
    index: int
    ambient: Ambient | None
    unit: int
    call: Call
    plain: tuple[int, ...] | None
    seeds: bool
    frees: tuple[int, ...]


class Program:
    """Units of a graph, ready to be walked.

    Args:
        graph: Where the units come from.
        units: Indices of the units to run, in execution order.
        keep: Nodes whose results are still needed when the program has ended.
        bind: Turns a node of a unit into what is called for it; the default calls the graph's own tensors and
            modules.
    """

    def __init__(
        self,
        graph: ModelGraph,
        units: Iterable[int],
        *,
        keep: Iterable[int] = (),
        bind: Callable[[Node, int], Call] | None = None,
    ) -> None:
        self.graph = graph
        self.units = tuple(units)
        steps = [(graph.nodes[index], unit) for unit in self.units for index in graph.units[unit].nodes]
        drawing = {unit for node, unit in steps if may_draw(graph, node)}
        self.instructions = _compile(steps, set(keep), drawing, bind or (lambda node, _: default_call(graph, node)))

    def run(
        self,
        environment: Environment,
        *,
        seed_unit: Callable[[int], None] | None = None,
        observe: Callable[[Instruction, Environment], contextlib.AbstractContextManager[None]] | None = None,
    ) -> Environment:
        """Run all nodes, taking and leaving values in *environment*, and return it.

        Args:
            environment: Holds the inputs and imported values under their nodes.
            seed_unit: Called with the index of each unit that may draw random numbers, before it runs.
            observe: A context around each instruction (measurement, analysis).
        """
        for instruction in self.instructions:
            if seed_unit is not None and instruction.seeds:
                seed_unit(instruction.unit)
            try:
                if observe is None:
                    _execute(instruction, environment)
                else:
                    with observe(instruction, environment):
                        _execute(instruction, environment)
            except UserError:
                raise
            except Exception as error:
                raise _located(error, self.graph, instruction) from error
            for index in instruction.frees:
                environment.pop(index, None)
        return environment


def _execute(instruction: Instruction, environment: Environment) -> None:
    if instruction.ambient is None:
        environment[instruction.index] = _call(instruction, environment)
    else:
        with _entered(instruction.ambient):
            environment[instruction.index] = _call(instruction, environment)


def _call(instruction: Instruction, environment: Environment) -> Any:
    if instruction.plain is not None:
        return instruction.call(*[environment[index] for index in instruction.plain])
    node = instruction.node

    def resolve(ref: Ref) -> Any:
        return environment[ref.index]

    return instruction.call(*map_refs(node.args, resolve), **map_refs(dict(node.kwargs), resolve))


@contextlib.contextmanager
def _entered(ambient: Ambient) -> Any:
    with contextlib.ExitStack() as stack:
        if not ambient.grad_enabled:
            stack.enter_context(torch.no_grad())
        if ambient.autocast is not None:
            device, enabled, dtype = ambient.autocast
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


def _compile(
    steps: Sequence[tuple[Node, int]], keep: set[int], drawing: set[int], bind: Callable[[Node, int], Call]
) -> tuple[Instruction, ...]:
    last_use: dict[int, int] = {}
    for position, (node, _) in enumerate(steps):
        last_use[node.index] = position
        for ref in node.refs:
            last_use[ref] = position
    frees: dict[int, list[int]] = {}
    for index, position in last_use.items():
        if index not in keep:
            frees.setdefault(position, []).append(index)
    instructions = []
    previous = None
    for position, (node, unit) in enumerate(steps):
        instructions.append(
            Instruction(
                node=node,
                index=node.index,
                ambient=None if node.ambient == DEFAULT_AMBIENT else node.ambient,
                unit=unit,
                call=bind(node, unit),
                plain=_plain_arguments(node),
                seeds=unit != previous and unit in drawing,
                frees=tuple(frees.get(position, ())),
            )
        )
        previous = unit
    return tuple(instructions)


def _plain_arguments(node: Node) -> tuple[int, ...] | None:
    if node.op in SOURCES:
        return ()
    if node.kwargs or not all(isinstance(argument, Ref) for argument in node.args):
        return None
    return tuple(argument.index for argument in node.args)


def default_call(graph: ModelGraph, node: Node) -> Call:
    """Return what is called for *node* when the graph's own modules and tensors are used."""
    if node.op == "module":
        return graph.modules[node.target]
    if node.op == "function":
        return node.target  # type: ignore[no-any-return]
    if node.op == "method":
        name = node.target
        return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)
    if node.op == "buffer":  # looked up on its module each time, since buffers may be replaced
        buffers, attribute = buffer_owner(graph, node.target)._buffers, node.target.rpartition(".")[2]
        return lambda: buffers[attribute]
    table: Mapping[str, torch.Tensor] = graph.parameters if node.op == "parameter" else graph.constants
    return lambda: table[node.target]


def buffer_owner(graph: ModelGraph, name: str) -> nn.Module:
    """Return the module that holds the buffer called *name*."""
    return graph.model.get_submodule(name.rpartition(".")[0])


def current_buffer(graph: ModelGraph, name: str) -> torch.Tensor:
    """Return the buffer called *name* that is on its module now: a forward pass may have put another tensor there."""
    found = buffer_owner(graph, name)._buffers[name.rpartition(".")[2]]
    return graph.buffers[name] if found is None else found


def _located(error: Exception, graph: ModelGraph, instruction: Instruction) -> StageError:
    if isinstance(error, StageError):
        return error
    unit = graph.units[instruction.unit]
    return StageError(
        f"unit {unit.index} '{unit.name}', node '{instruction.node.name}': {type(error).__name__}: {error}"
    )

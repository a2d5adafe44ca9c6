"""Find what a graph alone does not show: which operations change a tensor in place, and which tensors share memory.

A value that was changed in place and is used afterwards must be taken from the operation that changed it; else its
gradient would pass that operation by once a cut falls between. Where views of changed memory are used later, no cut
may fall between the view and its last use. Buffers that a forward pass changes are noted too. All is seen by running
the graph once on a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchslicer.graph.model import SOURCES, ModelGraph, Node, Ref, iter_refs, map_refs
from torchslicer.pipeline.buffers import BufferWatch
from torchslicer.pipeline.interpreter import Environment, Instruction, Program
from torchslicer.pipeline.untouched import own_inputs, untouched


@dataclass(frozen=True)
class Mutation:
    """Node ``by`` changed in place the tensor that ``holder`` had made; ``returned``: it is also its result."""

    by: int
    holder: int
    returned: bool


@dataclass
class _Memory:
    """Which node last made or changed each tensor object, and which objects share storage."""

    holders: dict[int, int]
    storages: dict[int, dict[int, int]]
    alive: list[Any]

    def note(self, value: Any, node: int) -> None:
        for tensor in _tensors(value):
            self.holders[id(tensor)] = node
            storage = tensor.untyped_storage().data_ptr()
            self.storages.setdefault(storage, {}).setdefault(id(tensor), node)
        self.alive.append(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Watcher:
    """Observes a run of the whole graph."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.memory = _Memory({}, {}, [])
        self.mutations: list[Mutation] = []
        self.shared_with: dict[int, tuple[int, ...]] = {}
        self.closed: dict[int, str] = {}
        self.buffers = BufferWatch(graph)
        self.results_in: dict[int, set[int]] = {}

    @contextlib.contextmanager
    def __call__(self, instruction: Instruction, environment: Environment) -> Iterator[None]:
        node = instruction.node
        before = {id(t): (t, t._version) for ref in node.refs for t in _tensors(environment.get(ref))}
        with self.buffers.watching(instruction.unit):
            yield
        result = environment[node.index]
        changed = {key for key, (tensor, version) in before.items() if tensor._version != version}
        returned = {id(tensor) for tensor in _tensors(result)}
        for key in changed:
            self._note_mutation(node, before[key][0], returned=key in returned)
        self._note_result(node, result, set(before) - changed)

    def _note_mutation(self, node: Node, tensor: torch.Tensor, *, returned: bool) -> None:
        holder = self.memory.holders.get(id(tensor))
        if holder is None:
            return
        storage = self.memory.storages.get(tensor.untyped_storage().data_ptr(), {})
        others = [maker for key, maker in storage.items() if key != id(tensor) or not returned]
        self.mutations.append(Mutation(node.index, holder, returned))
        self.shared_with[node.index] = (*self.shared_with.get(node.index, ()), *others)

    def _note_result(self, node: Node, result: Any, unchanged_arguments: set[int]) -> None:
        """Remember who made the result; a tensor handed through unchanged keeps its maker."""
        for tensor in _tensors(result):
            self.results_in.setdefault(tensor.untyped_storage().data_ptr(), set()).add(node.index)
        new = [tensor for tensor in _tensors(result) if id(tensor) not in unchanged_arguments]
        self.memory.note(new, node.index)
        closed = [type(leaf).__name__ for leaf in pytree.tree_leaves(result) if _holds_tensors(leaf)]
        if closed:
            self.closed[node.index] = closed[0]

    def in_changed_buffers(self) -> frozenset[int]:
        """Nodes whose results lie in the memory of a buffer that changes: the next micro-batch changes them too."""
        return frozenset().union(*(self.results_in.get(address, ()) for address in self.buffers.changed_memory()))


def analyse(graph: ModelGraph, inputs: Mapping[str, Any]) -> ModelGraph:
    """Run *graph* once on *inputs* and return it with in-place operations and shared memory accounted for.

    Leaves the model, the inputs and the global generators as they were.
    """
    inputs = own_inputs(inputs)
    with torch.no_grad(), untouched(graph.model):
        watcher = _Watcher(graph)
        environment: Environment = {entry.node: inputs[entry.name] for entry in graph.inputs}
        for node, value in environment.items():
            watcher.memory.note(value, node)
        Program(graph, range(len(graph.units)), keep=range(len(graph.nodes))).run(environment, observe=watcher)
    graph = replace(_kept_together(graph, watcher.closed), changing=watcher.buffers.changing())
    if watcher.mutations:
        graph = _glued(_renamed(graph, watcher.mutations), watcher)
    return _glued_to_buffers(graph, watcher.in_changed_buffers())


def _holds_tensors(leaf: Any) -> bool:
    """Whether *leaf* is an object with tensors inside that nothing here can take apart (a dataclass, say)."""
    if isinstance(leaf, (torch.Tensor, nn.Module, type)):
        return False
    inside = {name: getattr(leaf, name, None) for name in (*getattr(leaf, "__dict__", ()), *_slots(leaf))}
    return any(isinstance(tensor, torch.Tensor) for tensor in pytree.tree_leaves(inside))


def _slots(leaf: Any) -> tuple[str, ...]:
    slots = getattr(type(leaf), "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _kept_together(graph: ModelGraph, closed: Mapping[int, str]) -> ModelGraph:
    """Forbid cuts between the maker and the users of an object whose tensors cannot be taken out."""
    forbidden = dict(graph.forbidden)
    for node, kind in closed.items():
        first, last = graph.unit_of.get(node, 0), _last_user(graph, node)
        reason = f"'{graph.nodes[node].name}' hands on a {kind}, whose tensors cannot cross a cut; use a tuple or dict"
        forbidden.update(dict.fromkeys(range(first + 1, last + 1), reason))
    return replace(graph, forbidden=forbidden)


def _renamed(graph: ModelGraph, mutations: list[Mutation]) -> ModelGraph:
    """Let every use after an in-place operation take its result instead of the tensor's earlier name."""
    order = {node: place for place, node in enumerate(_execution_order(graph))}
    changes = sorted((m for m in mutations if m.returned), key=lambda m: order[m.by])

    def current(ref: Ref, at: int) -> Ref:
        index = ref.index
        for change in changes:
            if change.holder == index and order[change.by] < at:
                index = change.by
        return Ref(index)

    nodes = tuple(
        node if node.index not in order else _with_refs(node, lambda ref, at=order[node.index]: current(ref, at))
        for node in graph.nodes
    )
    output = map_refs(graph.output, lambda ref: current(ref, len(order)))
    return replace(graph, nodes=nodes, output=output)


def _execution_order(graph: ModelGraph) -> list[int]:
    return [node for unit in graph.units for node in unit.nodes if graph.nodes[node].op not in SOURCES]


def _with_refs(node: Node, function: Any) -> Node:
    return replace(node, args=map_refs(node.args, function), kwargs=map_refs(dict(node.kwargs), function))


def _glued(graph: ModelGraph, watcher: _Watcher) -> ModelGraph:
    """Forbid cuts between a view of changed memory and its last use after the change; note all changed values."""
    forbidden, mutated = dict(graph.forbidden), set(graph.mutated)
    for mutation in watcher.mutations:
        makers = dict.fromkeys(watcher.shared_with[mutation.by])
        mutated.update((mutation.holder, *makers))
        for maker in makers:
            last = _last_user(graph, maker)
            if last > graph.unit_of[mutation.by]:
                first = graph.unit_of.get(maker, 0)
                reason = (
                    f"'{graph.nodes[mutation.by].name}' changes memory in place that '{graph.nodes[maker].name}' shares"
                )
                forbidden.update(dict.fromkeys(range(first + 1, last + 1), reason))
    return replace(graph, forbidden=forbidden, mutated=frozenset(mutated))


def _glued_to_buffers(graph: ModelGraph, nodes: frozenset[int]) -> ModelGraph:
    """Forbid cuts between *nodes* and their last uses: what lies in a buffer is the buffer, not a value of a moment."""
    forbidden = dict(graph.forbidden)
    for node in sorted(nodes & graph.unit_of.keys()):
        reason = f"'{graph.nodes[node].name}' hands on the memory of a buffer that changes in the forward pass"
        for unit in range(graph.unit_of[node] + 1, _last_user(graph, node) + 1):
            forbidden.setdefault(unit, reason)
    return replace(graph, forbidden=forbidden)


def _last_user(graph: ModelGraph, node: int) -> int:
    if any(ref.index == node for ref in iter_refs(graph.output)):
        return len(graph.units) - 1
    users = [unit.index for unit in graph.units for index in unit.nodes if node in graph.nodes[index].refs]
    return max(users, default=-1)

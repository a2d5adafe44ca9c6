"""Group the nodes of a model into units, the smallest pieces that may be cut apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from torchslicer.graph.model import SOURCES, Node, Unit


@dataclass
class _Group:
    """Nodes that will become one unit."""

    name: str
    kind: str
    scope: str
    nodes: list[Node] = field(default_factory=list)
    uses_parameters: bool = False
    call: str | None = None


def form_units(
    nodes: Sequence[Node],
    modules: Mapping[str, nn.Module],
    names: Mapping[int, str],
    kind_of: Callable[[str], str],
    calls: Mapping[int, str] | None = None,
) -> tuple[Unit, ...]:
    """Return the units of *nodes*; *names* maps the identity of a parameter or buffer to its qualified name.

    A call of a module starts a unit. A functional operation joins the unit before it, unless it uses a parameter
    of its own or enters a module that the unit before it is not in; then it starts one. *calls* says which nodes
    are the operations of one and the same call of a leaf module (node index to a key of the call): they form one
    unit together.
    """
    groups: list[_Group] = []
    for node in nodes:
        if node.op == "input" or node.op in SOURCES:
            continue
        if calls is not None and node.index in calls:
            _place_in_call(node, calls[node.index], groups, kind_of)
        else:
            _place(node, nodes, groups, kind_of)
    _merge_leading_operations(groups)
    return tuple(_unit(index, group, nodes, modules, names) for index, group in enumerate(groups))


def _place(node: Node, nodes: Sequence[Node], groups: list[_Group], kind_of: Callable[[str], str]) -> None:
    if node.op == "module":
        groups.append(_Group(node.target, kind_of(node.target), node.scope, [node], True))
        return
    parameters = [nodes[ref].target for ref in node.refs if nodes[ref].op == "parameter"]
    if parameters or not groups or not _is_inside(groups[-1].scope, node.scope):
        groups.append(
            _Group(parameters[0] if parameters else node.scope, "functions", node.scope, [], bool(parameters))
        )
    groups[-1].nodes.append(node)
    groups[-1].scope = node.scope
    groups[-1].call = None


def _place_in_call(node: Node, call: str, groups: list[_Group], kind_of: Callable[[str], str]) -> None:
    if not groups or groups[-1].call != call:
        groups.append(_Group(node.scope, kind_of(node.scope), node.scope, [], True, call))
    groups[-1].nodes.append(node)


def _is_inside(scope: str, ancestor: str) -> bool:
    return ancestor in ("", scope) or scope.startswith(ancestor + ".")


def _merge_leading_operations(groups: list[_Group]) -> None:
    """Operations before the first module (sizes, reshapes) belong to it."""
    while len(groups) > 1 and not groups[0].uses_parameters and _is_inside(groups[1].scope, groups[0].scope):
        first = groups.pop(0)
        groups[0].nodes[:0] = first.nodes


def _unit(
    index: int, group: _Group, nodes: Sequence[Node], modules: Mapping[str, nn.Module], names: Mapping[int, str]
) -> Unit:
    sources = dict.fromkeys(ref for node in group.nodes for ref in node.refs if nodes[ref].op in SOURCES)
    parameters = dict.fromkeys(nodes[ref].target for ref in sources if nodes[ref].op == "parameter")
    buffers = dict.fromkeys(nodes[ref].target for ref in sources if nodes[ref].op == "buffer")
    for node in group.nodes:
        if node.op == "module":
            module = modules[node.target]
            parameters.update(dict.fromkeys(names[id(tensor)] for tensor in module.parameters()))
            buffers.update(dict.fromkeys(names[id(tensor)] for tensor in module.buffers()))
    members = sorted({*sources, *(node.index for node in group.nodes)})
    return Unit(index, group.name or "(model)", group.kind, tuple(members), tuple(parameters), tuple(buffers))

"""The parameters of one rank, and how tied ones get their gradient.

A parameter used by several units gets one alias (a leaf on the same storage) per use. Each use accumulates into its
own alias, and at the step the gradients are added in reverse order of use, which is the order in which autograd adds
them in the unsplit model. So the bits do not depend on whether the uses share a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchslicer.graph.model import ModelGraph, Node
from torchslicer.pipeline.interpreter import Call, default_call


class ParameterTable:
    """All parameters that the stages of one rank use.

    Args:
        graph: The graph that is trained.
        stage_of: Stage of each unit.
        devices: Device of each stage.
        held: The stages that the rank holds; all by default.
    """

    def __init__(
        self,
        graph: ModelGraph,
        stage_of: Sequence[int],
        devices: Sequence[torch.device],
        held: Sequence[int] | None = None,
    ) -> None:
        self.graph = graph
        self.stage_of = stage_of
        self.held = tuple(sorted(set(stage_of))) if held is None else tuple(held)
        self.aliases: dict[str, dict[int, nn.Parameter]] = {}
        for name, units in graph.shared.items():
            mine = [unit for unit in units if stage_of[unit] in self.held]
            if mine:
                self.aliases[name] = {unit: self._alias(name, devices[stage_of[unit]]) for unit in mine}
        self._names = {id(parameter): name for name, parameter in graph.parameters.items()}

    def _alias(self, name: str, device: torch.device) -> nn.Parameter:
        main = self.graph.parameters[name]
        return nn.Parameter(main.detach().to(device), requires_grad=main.requires_grad)

    def _first_stage(self, name: str, among: Sequence[int]) -> int | None:
        """The first stage of *among* that uses the parameter *name*."""
        for unit in self.graph.units:
            if name in unit.parameters and self.stage_of[unit.index] in among:
                return self.stage_of[unit.index]
        return None

    def updated_by(self, stage: int) -> dict[str, nn.Parameter]:
        """Parameters that *stage* updates: those that it is the first of this rank's stages to use.

        A tied parameter of which several ranks hold a copy is updated by each of them, alike.
        """
        return {n: p for n, p in self.graph.parameters.items() if self._first_stage(n, self.held) == stage}

    def owned(self) -> dict[str, nn.Parameter]:
        """Parameters whose first use in the whole model is in a stage of this rank, in the model's order."""
        stages = range(self.stage_of[-1] + 1)
        return {n: p for n, p in self.graph.parameters.items() if self._first_stage(n, stages) in self.held}

    def all_parameters(self) -> Iterable[nn.Parameter]:
        """Every parameter that this rank holds."""
        return self.graph.parameters.values()

    def bind(self, node: Node, unit: int) -> Call:
        """Return what is called for *node* of *unit*, so that tied parameters are reached through their alias."""
        if node.op == "parameter" and node.target in self.aliases:
            alias = self.aliases[node.target][unit]
            return lambda: alias
        if node.op == "module":
            module = self.graph.modules[node.target]
            places = self._tied_places(module, unit)
            return _WithAliases(module, places) if places else module
        return default_call(self.graph, node)

    def _tied_places(self, module: nn.Module, unit: int) -> list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        places = []
        for child in module.modules():
            for attribute, parameter in child._parameters.items():
                name = self._names.get(id(parameter))
                if parameter is not None and name in self.aliases:
                    places.append((child, attribute, parameter, self.aliases[name][unit]))
        return places

    def combine_gradients(self, foreign: Mapping[str, Mapping[int, torch.Tensor | None]] | None = None) -> None:
        """Add the gradients of every tied parameter's uses, last use first, into the parameter itself.

        *foreign* holds, by parameter and unit, the gradients of uses in other ranks.
        """
        for name, uses in self.aliases.items():
            main = self.graph.parameters[name]
            gradients: dict[int, torch.Tensor | None] = dict((foreign or {}).get(name, {}))
            for unit, alias in uses.items():
                gradients[unit], alias.grad = alias.grad, None
            total: torch.Tensor | None = None
            for unit in sorted(gradients, reverse=True):
                gradient = gradients[unit]
                if gradient is not None:
                    total = gradient.to(main.device) if total is None else total + gradient.to(main.device)
            main.grad = total if total is None else _hooked(main, total)

    def refresh_aliases(self) -> None:
        """Copy updated parameters into aliases that live on another device; others share the storage."""
        for name, uses in self.aliases.items():
            main = self.graph.parameters[name]
            for alias in uses.values():
                if alias.device != main.device:
                    alias.data.copy_(main.data)

    def clear_gradients(self) -> None:
        """Forget all gradients, as ``optimizer.zero_grad()`` does."""
        for parameter in self.graph.parameters.values():
            parameter.grad = None
        for uses in self.aliases.values():
            for alias in uses.values():
                alias.grad = None


def _hooked(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Run the gradient hooks of a parameter, which autograd runs only where it meets the parameter itself."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class _WithAliases:
    """Calls a module with some of its parameters replaced for the time of the call."""

    def __init__(self, module: nn.Module, places: Sequence[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]) -> None:
        self.module = module
        self.places = places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for child, attribute, _, alias in self.places:
            setattr(child, attribute, alias)
        try:
            return self.module(*args, **kwargs)
        finally:
            for child, attribute, original, _ in self.places:
                setattr(child, attribute, original)


def place(graph: ModelGraph, stage_of: Sequence[int], devices: Sequence[torch.device]) -> None:
    """Move the tensors of every unit to the device of its stage."""
    owner: dict[str, torch.device] = {}
    for unit in graph.units:
        for name in (*unit.parameters, *unit.buffers):
            owner.setdefault(name, devices[stage_of[unit.index]])
    tensors: Mapping[str, torch.Tensor] = {**graph.buffers, **graph.parameters}
    for name, device in owner.items():
        if tensors[name].device != device:
            tensors[name].data = tensors[name].data.to(device)

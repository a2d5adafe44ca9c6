"""A model in its two modes: training as the user has set the flags, evaluation with all flags off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from torchslicer.errors import SliceError
from torchslicer.graph.model import ModelGraph

Settings = tuple[tuple[str, int, tuple[tuple[str, object], ...]], ...]

_PLAIN = (bool, int, float, str, type(None))


def settings_of(graph: ModelGraph) -> Settings:
    """Return what a trace takes for granted: which modules and parameters there are, and attributes that it has read.

    ``training`` flags are among them, and numbers such as a drop rate. Modules that the graph calls whole read their
    attributes anew at each call, so theirs do not count.
    """
    whole = {id(child) for module in graph.modules.values() for child in module.modules()}
    modules = tuple(
        (path, id(module), () if id(module) in whole else _plain_attributes(module))
        for path, module in graph.model.named_modules(remove_duplicate=False)
    )
    return modules + tuple((name, id(parameter), ()) for name, parameter in graph.model.named_parameters())


def _without_flags(settings: Settings) -> list[object]:
    return [(p, number, [pair for pair in pairs if pair[0] != "training"]) for p, number, pairs in settings]


def _plain_attributes(module: nn.Module) -> tuple[tuple[str, object], ...]:
    return tuple((name, value) for name, value in vars(module).items() if type(value) in _PLAIN)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode for a while, and each flag back afterwards.

    *others* are modules beside the model, such as the wrappers that a pack function makes.
    """
    flags = [(module, module.training) for root in (model, *others) for module in root.modules()]
    for module, _ in flags:
        module.training = False
    try:
        yield
    finally:
        for module, flag in reversed(flags):
            module.training = flag


@dataclass(frozen=True)
class ModeGraphs:
    """The graphs of a model: ``training`` (for the settings that it was traced under) and ``evaluation``.

    They differ where the forward pass asks for ``self.training``.
    """

    training: ModelGraph
    evaluation: ModelGraph
    settings: Settings

    def is_current(self, *, with_flags: bool = True) -> bool:
        """Whether the model is still as it was when it was traced; without flags, ``training`` may have changed."""
        now = settings_of(self.training)
        return self.settings == now if with_flags else _without_flags(self.settings) == _without_flags(now)


def trace_modes(model: nn.Module, trace: Callable[[], ModelGraph]) -> ModeGraphs:
    """Trace *model* as it is and in evaluation mode."""
    training = trace()
    with evaluation_mode(model):
        evaluation = trace()
    return ModeGraphs(training, evaluation, settings_of(training))


def stages_of_evaluation(graphs: ModeGraphs, stage_of: Sequence[int]) -> tuple[int, ...]:
    """Return the stage of each unit of the evaluation graph, given those of the training graph.

    A unit with parameters runs where the training graph has them; operations without run as early as their
    arguments allow.

    Raises:
        SliceError: The evaluation graph uses its modules in an order that the cut does not allow.
    """
    home = {name: stage_of[unit.index] for unit in reversed(graphs.training.units) for name in unit.parameters}
    named = {unit.name: stage_of[unit.index] for unit in reversed(graphs.training.units)}
    graph = graphs.evaluation
    stages: list[int] = []
    if _same_units(graphs):
        return tuple(stage_of)
    for unit in graph.units:
        wanted = [home[name] for name in unit.parameters if name in home and name not in graphs.training.shared]
        wanted = wanted or ([named[unit.name]] if unit.name in named else [])
        before = stages[-1] if stages else 0
        stage = max(wanted[0] if wanted else before, before)
        if wanted and stage != wanted[0]:
            raise SliceError(
                f"in evaluation mode '{unit.name}' runs after later stages, which the cut does not allow; choose other "
                "cuts, or give a pack function"
            )
        stages.append(stage)
    return tuple(stages)


def _same_units(graphs: ModeGraphs) -> bool:
    return [unit.name for unit in graphs.training.units] == [unit.name for unit in graphs.evaluation.units]

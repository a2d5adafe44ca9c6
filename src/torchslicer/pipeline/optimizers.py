"""Optimizers and learning-rate schedulers as values, checked before training; gradient clipping over all stages.

Every stage gets its own optimizer and scheduler from the same spec.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from torchslicer.errors import ConfigError, nearest
from torchslicer.pipeline.specs import check_params, construct, find_class, read_spec

Interval = Literal["epoch", "step"]
_INTERVALS = ("epoch", "step")
_WITH_CLOSURE = ("LBFGS",)


@dataclass(frozen=True)
class ParameterGroup:
    """Options for the parameters whose names match one of *patterns* (fnmatch, or ``re:`` and an expression)."""

    patterns: tuple[str, ...]
    options: Mapping[str, Any]

    def matches(self, name: str) -> bool:
        """Whether the whole of *name* fits one of the patterns."""
        return any(_pattern_matches(pattern, name) for pattern in self.patterns)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer to be made for each stage. Make one with `build_optimizer_spec`.

    Attributes:
        name: What to call it in messages.
        factory: Makes the optimizer from parameters or parameter groups.
        groups: Parameter groups; the first that matches a name takes it, the rest is the default group.
    """

    name: str
    factory: Callable[[Any], Any]
    groups: tuple[ParameterGroup, ...] = ()

    def check(self, named: Iterable[str | tuple[str, Tensor]]) -> None:
        """Check the spec against the whole model: names, or ``(name, parameter)`` pairs to check shapes as well.

        Raises:
            ConfigError: If a pattern matches no name, or Muon would get a parameter that is no matrix.
        """
        pairs = [(item, None) if isinstance(item, str) else item for item in named]
        for group in self.groups:
            for pattern in group.patterns:
                if not any(_pattern_matches(pattern, name) for name, _ in pairs):
                    raise ConfigError(
                        f"optimizer {self.name}: the pattern {pattern!r} matches no parameter of the model"
                        f"{nearest(pattern, [name for name, _ in pairs])}; parameters are called like "
                        f"{[name for name, _ in pairs[:5]]}"
                    )
        if self.name == "Muon":
            _check_matrices(pairs)

    def build(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer | None:
        """Return the optimizer of a stage, or None if no parameter of it requires a gradient.

        Every stage has all groups, empty ones too, so that schedulers with one value a group fit.

        Raises:
            ConfigError: If the optimizer refuses the parameters.
        """
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if not trained:
            return None
        optimizer = construct(f"optimizer {self.name}", lambda: self.factory(self._grouped(trained)))
        return _checked_optimizer(self.name, optimizer)

    def _grouped(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[Any]:
        if not self.groups:
            return [parameter for _, parameter in named]
        members: list[list[nn.Parameter]] = [[] for _ in range(len(self.groups) + 1)]
        for name, parameter in named:
            first = next((i for i, group in enumerate(self.groups, start=1) if group.matches(name)), 0)
            members[first].append(parameter)
        options: list[Mapping[str, Any]] = [{}, *(group.options for group in self.groups)]
        return [{"params": params, **extra} for params, extra in zip(members, options, strict=True)]


def build_optimizer_spec(spec: Any) -> OptimizerSpec:
    """Build an optimizer spec from what a user may give; its values are tried on a small parameter.

    Args:
        spec: A name (``"adamw"``), ``{"name": ..., "params": {...}}``, a class, or a factory ``(params) ->
            Optimizer``. ``params["groups"]`` (or ``"groups"`` beside it) lists ``{"match": patterns, option: value}``.

    Raises:
        ConfigError: If a name, parameter or value is unknown or impossible, the optimizer is LBFGS, or an instance.

    Example:
        >>> build_optimizer_spec({"name": "sgd", "params": {"lr": 0.1}}).name
        'SGD'
    """
    if isinstance(spec, OptimizerSpec):
        return spec
    params: dict[str, Any] = {}
    if isinstance(spec, (str, Mapping)):
        groups = spec.get("groups") if isinstance(spec, Mapping) else None
        spec, params = read_spec(spec, "optimizer", extra=("groups",))
        params |= {"groups": groups} if groups else {}
    if isinstance(spec, str):
        spec = find_class(spec, _optimizer_classes(), "optimizer", refused=_WITH_CLOSURE)
    if isinstance(spec, functools.partial) and isinstance(spec.func, type) and not spec.args:
        spec, params = spec.func, {**spec.keywords, **params}
    if isinstance(spec, type) and issubclass(spec, Optimizer):
        return _spec_from_class(spec, params)
    if isinstance(spec, Optimizer) or not callable(spec):
        raise ConfigError(
            f"optimizer: got {_kind(spec)}, but each stage has an optimizer of its own; pass a name, "
            f'{{"name": ..., "params": {{...}}}}, the class, or a factory such as lambda params: SGD(params, lr=0.1)'
        )
    return _tried(OptimizerSpec(getattr(spec, "__name__", type(spec).__name__), functools.partial(spec, **params)))


def _spec_from_class(cls: type[Optimizer], params: dict[str, Any]) -> OptimizerSpec:
    where = f"optimizer {cls.__name__}"
    _refuse_lbfgs(cls)
    groups = tuple(_read_group(cls, group, where) for group in params.pop("groups", None) or ())
    check_params(cls, params, where, hidden=("params",))
    # YAML and JSON have no tuples; optimizers are documented with them (betas, eps).
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in params.items()
    }
    for group in groups:  # optimizers check their defaults but not the options of a group
        _tried(OptimizerSpec(cls.__name__, functools.partial(cls, **{**values, **group.options})))
    return _tried(OptimizerSpec(cls.__name__, functools.partial(cls, **values), groups))


def _read_group(cls: type[Optimizer], group: Any, where: str) -> ParameterGroup:
    if not isinstance(group, Mapping) or "match" not in group:
        raise ConfigError(f'{where}: each of "groups" must be a dictionary with "match" and options, got {group!r}')
    match = group["match"]
    patterns = (match,) if isinstance(match, str) else tuple(match)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f'{where}: "match" takes patterns as strings, got {pattern!r}')
        construct(f"{where}: pattern {pattern!r}", functools.partial(_pattern_matches, pattern, ""))
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in group.items() if name != "match"}
    check_params(cls, options, f"{where}, group {match!r}", hidden=("params",))
    return ParameterGroup(patterns, options)


def _pattern_matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigError(f"{pattern!r} is no regular expression: {error}") from error
    return fnmatchcase(name, pattern)


def _tried(spec: OptimizerSpec) -> OptimizerSpec:
    spec.build([("weight", _dummy())])
    return spec


def _dummy() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 2))


def _checked_optimizer(name: str, optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer factory {name} must return a torch.optim.Optimizer, got {_kind(optimizer)}")
    _refuse_lbfgs(type(optimizer))
    return optimizer


def _refuse_lbfgs(cls: type) -> None:
    if issubclass(cls, torch.optim.LBFGS):
        raise ConfigError(
            "optimizer LBFGS cannot train a sliced model: each of its steps evaluates the whole model several times "
            "through a closure, and no stage holds the whole model; use another optimizer"
        )


def _check_matrices(pairs: Sequence[tuple[str, Tensor | None]]) -> None:
    bad = [name for name, p in pairs if p is not None and p.requires_grad and p.dim() != 2]
    if bad:
        shown = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
        raise ConfigError(
            f"optimizer Muon takes matrices (2 dimensions) only, but {len(bad)} parameter(s) are none: {shown}; freeze "
            "them or use another optimizer, such as AdamW"
        )


@functools.cache
def _optimizer_classes() -> dict[str, type]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {n: c for n, c in found.items() if isinstance(c, type) and issubclass(c, Optimizer) and c is not Optimizer}


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an instance of {type(value).__name__}"


@dataclass(frozen=True)
class SchedulerSpec:
    """A learning-rate scheduler to be made for each stage. Make one with `build_scheduler_spec`.

    Attributes:
        name: What to call it in messages.
        factory: Makes the scheduler from an optimizer.
        interval: Whether it advances once an ``"epoch"`` or once a ``"step"``.
        monitor: What ReduceLROnPlateau looks at: ``"loss"`` or a metric of the evaluation.
    """

    name: str
    factory: Callable[[Optimizer], Any]
    interval: Interval = "epoch"
    monitor: str = "loss"

    def build(self, optimizer: Optimizer) -> Any:
        """Return the scheduler of one stage's optimizer.

        Raises:
            ConfigError: If the scheduler refuses the optimizer or a value.
        """
        scheduler = construct(f"scheduler {self.name}", lambda: self.factory(optimizer))
        if not isinstance(scheduler, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)):
            raise ConfigError(f"scheduler factory {self.name} must return a scheduler, got {_kind(scheduler)}")
        return scheduler

    def step(self, scheduler: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Advance *scheduler*; *metrics* is what is known of the epoch (ReduceLROnPlateau looks at ``monitor``).

        Raises:
            ConfigError: If the metrics lack ``monitor``.
        """
        if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step()
            return
        known = metrics or {}
        value = known.get(self.monitor, known.get(f"eval_{self.monitor}"))
        if value is None:
            raise ConfigError(
                f"scheduler {self.name} monitors {self.monitor!r}{nearest(self.monitor, known)}, which the epoch did "
                f"not give; it gave {list(known)} (evaluation metrics need eval_loader=)"
            )
        scheduler.step(value)


def build_scheduler_spec(spec: Any, *, optimizer: OptimizerSpec | None = None) -> SchedulerSpec | None:
    """Build a scheduler spec from what a user may give; it is tried on a small parameter. None stays None.

    Args:
        spec: A name, ``{"name": ..., "params": {...}, "interval": "epoch" | "step", "monitor": ...}`` or a factory
            ``(optimizer) -> scheduler``. SequentialLR and ChainedScheduler take such dictionaries in a list under
            ``params["schedulers"]``.
        optimizer: What to try it on; without it SGD with momentum.

    Raises:
        ConfigError: If a name, parameter or value is unknown or impossible.

    Example:
        >>> build_scheduler_spec({"name": "StepLR", "params": {"step_size": 3}}).interval
        'epoch'
    """
    if spec is None or isinstance(spec, SchedulerSpec):
        return spec
    options = dict(spec) if isinstance(spec, Mapping) else {}
    name, factory = _scheduler_factory(spec, extra=("interval", "monitor"))
    plateau = name == "ReduceLROnPlateau"
    interval = options.get("interval", "epoch")
    if interval not in _INTERVALS:
        raise ConfigError(f"scheduler {name}: interval must be one of {list(_INTERVALS)}, got {interval!r}")
    if plateau and interval == "step":
        raise ConfigError(f'scheduler {name} looks at results of whole epochs: set interval to "epoch"')
    if "monitor" in options and not plateau:
        raise ConfigError(f"scheduler {name} looks at no metric: remove monitor, or use ReduceLROnPlateau")
    made = SchedulerSpec(name, factory, interval, options.get("monitor", "loss"))
    _try_scheduler(made, optimizer or OptimizerSpec("SGD", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)))
    return made


def _scheduler_factory(spec: Any, extra: Sequence[str] = ()) -> tuple[str, Callable[[Optimizer], Any]]:
    params: dict[str, Any] = {}
    if isinstance(spec, (str, Mapping)):
        spec, params = read_spec(spec, "scheduler", extra)
    if isinstance(spec, str):
        spec = find_class(spec, _scheduler_classes(), "scheduler")
    if not callable(spec):
        raise ConfigError(
            f"scheduler: got {_kind(spec)}, but each stage has a scheduler of its own; pass a name, a dictionary or a "
            "factory such as lambda optimizer: StepLR(optimizer, 10)"
        )
    name = getattr(spec, "__name__", type(spec).__name__)
    if not isinstance(spec, type):
        return name, functools.partial(spec, **params)
    check_params(spec, params, f"scheduler {name}", hidden=("optimizer",))
    return name, functools.partial(_make_scheduler, spec, params)


def _make_scheduler(cls: type, params: Mapping[str, Any], optimizer: Optimizer) -> Any:
    values = dict(params)
    if "schedulers" in values:
        values["schedulers"] = [_scheduler_factory(inner)[1](optimizer) for inner in values["schedulers"]]
    return cls(optimizer=optimizer, **values)


def _try_scheduler(spec: SchedulerSpec, optimizer_spec: OptimizerSpec) -> None:
    optimizer = optimizer_spec.build([("weight", _dummy())])
    if optimizer is None:
        return
    scheduler = spec.build(optimizer)
    optimizer.step()  # without gradients: changes nothing, but schedulers want it before their own step
    construct(f"scheduler {spec.name}", lambda: spec.step(scheduler, {spec.monitor: 1.0}))


@functools.cache
def _scheduler_classes() -> dict[str, type]:
    found = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
    return {n: c for n, c in found.items() if inspect.isclass(c) and n not in ("LRScheduler", "_LRScheduler")}


def gradient_norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each gradient, in order; bitwise what `torch.nn.utils.clip_grad_norm_` computes."""
    grads = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in grads]
    norms: list[Tensor | None] = [None] * len(grads)
    for indices in _alike(grads).values():
        made = torch._foreach_norm([grads[i].detach() for i in indices], 2.0)
        for i, norm in zip(indices, made, strict=True):
            norms[i] = norm
    return [norm for norm in norms if norm is not None]


def global_norm(norms_in_parameter_order: Sequence[Tensor]) -> Tensor:
    """Return the norm over all gradients from the norms of each, which may lie on several devices.

    Example:
        >>> global_norm([torch.tensor(3.0), torch.tensor(4.0)])
        tensor(5.)
    """
    norms = list(norms_in_parameter_order)
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
    return total


def clip_coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, at most 1, that brings gradients of *total_norm* down to *max_norm*."""
    return torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)


def scale_gradients(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply every gradient by *coefficient*, in place."""
    with torch.no_grad():
        for (device, _), indices in _alike(grads).items():
            torch._foreach_mul_([grads[i] for i in indices], coefficient.to(device))


def _alike(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return groups

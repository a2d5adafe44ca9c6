"""From what a user passes to ``train`` to checked options: keyword arguments over the configuration over defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from torch import nn

from torchslicer.config import RunConfig
from torchslicer.config.sections import PipelineSection, assign
from torchslicer.errors import ConfigError, UnknownArgumentError, nearest
from torchslicer.pipeline.criterion import build_criterion
from torchslicer.pipeline.optimizers import build_optimizer_spec, build_scheduler_spec
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.schedule import generate

P = ParamSpec("P")
R = TypeVar("R")

_OF_OPTIMIZER = ("optimizer", 'an option of the optimizer goes there: optimizer={"name": "SGD", "params": {"lr": 0.1}}')
_NUMBER = ("n", "the number of stages is n=")
_ELSEWHERE = {
    **dict.fromkeys(("lr", "learning_rate", "momentum", "weight_decay", "betas"), _OF_OPTIMIZER),
    **dict.fromkeys(("stages", "num_stages", "n_stages"), _NUMBER),
}
"""Keywords that somebody used to other libraries may try: the keyword that stands for it here, and what to write."""


def names_checked(
    call: str, *, further: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function say which keyword was meant where Python would only say which one it does not take.

    The signature stays, for `help`, `inspect.signature` and type checkers.

    Args:
        call: What messages call the function.
        further: What a function with ``**keywords`` passes them on to, so that they are checked before it starts.

    Raises:
        UnknownArgumentError: A keyword is unknown (when the function is called).
        ConfigError: ``run_config`` is no configuration (then, too).

    Example:
        >>> @names_checked("area")
        ... def area(*, width: float, height: float) -> float:
        ...     return width * height
        >>> area(width=2.0, heights=3.0)
        Traceback (most recent call last):
        torchslicer.errors.UnknownArgumentError: area: unknown keyword 'heights'; did you mean 'height'? Keywords are \
width, height
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = tuple(dict.fromkeys((*_keywords(function), *(_keywords(further) if further else ()))))

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    hint = nearest(name, known) or _elsewhere(name, known)
                    keywords = ", ".join(known)
                    raise UnknownArgumentError(f"{call}: unknown keyword {name!r}{hint} Keywords are {keywords}")
            check_config(kwargs.get("run_config"))
            return function(*args, **kwargs)

        return checked

    return decorate


def _elsewhere(name: str, known: Sequence[str]) -> str:
    """Say where a keyword that other libraries have belongs here."""
    target, remedy = _ELSEWHERE.get(name, ("", ""))
    return f"; {remedy}." if target in known else "."


def _keywords(function: Callable[..., Any]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in named and parameter.name != "self"]


@dataclass(frozen=True)
class TrainSettings:
    """What ``train`` was asked for; None means not given."""

    epochs: int | None = None
    mixed_precision: bool | None = None
    use_gpipe: bool | None = None
    n_micro_batches: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    scheduler: Any = None
    max_grad_norm: float | None = None
    accumulate: int | None = None
    recompute: str | None = None
    batch_norm: str | None = None
    seed: int | None = None
    target_key: str | None = None


_TRAINING = (
    "epochs", "mixed_precision", "max_grad_norm", "accumulate", "recompute", "batch_norm", "seed", "target_key"
)  # fmt: skip


def check_config(config: Any) -> None:
    """Check that *config* is a configuration, or none.

    Raises:
        ConfigError: It is something else, such as the name of a file.
    """
    if not isinstance(config, RunConfig | None):
        raise ConfigError(f"run_config: expected a RunConfig, such as RunConfig.load('run.yaml'), got {config!r:.80}")


def resolve_config(settings: TrainSettings, config: RunConfig | None) -> RunConfig:
    """Return the configuration of a run: *config* (or the defaults) with what was passed to ``train`` put over it.

    Raises:
        ConfigError: A value is impossible, or two of them contradict each other. It is named as the argument that it
            came in, not as the key of the configuration.
    """
    resolved = RunConfig() if config is None else config.model_copy(deep=True)
    for name in _TRAINING:
        value = getattr(settings, name)
        if value is not None:
            assign(resolved.training, name, value, argument=name)
    _resolve_pipeline(settings, resolved)
    return resolved


def _resolve_pipeline(settings: TrainSettings, resolved: RunConfig) -> None:
    pipeline, use_gpipe = resolved.pipeline, _use_gpipe(settings)
    argument, count = _one_count(settings)
    if count is not None:
        assign(pipeline, "n_micro", count, argument=argument)
        count = pipeline.n_micro  # checked, and an integer now
    if use_gpipe and settings.schedule not in (None, "gpipe"):
        raise ConfigError(f"use_gpipe=True contradicts schedule={settings.schedule!r}; give one of them")
    if use_gpipe is False and settings.schedule is None and (count or 1) > 1:
        raise ConfigError(f"use_gpipe=False contradicts {count} micro-batches; leave it out, or give schedule=")
    if use_gpipe is False or settings.schedule is not None:
        pipeline.use_gpipe = False
    if use_gpipe is False and settings.schedule is None:
        pipeline.schedule = None
    if settings.schedule is not None:
        assign(pipeline, "schedule", settings.schedule, argument="schedule")
    if use_gpipe:
        pipeline.schedule = None
        pipeline.use_gpipe = True
    if count is not None and count > 1 and not pipeline.use_gpipe and pipeline.schedule is None:
        pipeline.schedule = "gpipe"


def _use_gpipe(settings: TrainSettings) -> bool | None:
    """Return the argument as a truth value (a configuration takes ``"yes"`` and 1, too), None if it was not given."""
    if settings.use_gpipe is None:
        return None
    alone = PipelineSection()  # the schedule of the configuration has nothing to say yet
    assign(alone, "use_gpipe", settings.use_gpipe, argument="use_gpipe")
    return alone.use_gpipe


def _one_count(settings: TrainSettings) -> tuple[str, int | None]:
    """Return the number of micro-batches and the name that it was given by."""
    a, b = settings.n_micro_batches, settings.num_microbatches
    if a is not None and b is not None and a != b:
        raise ConfigError(f"n_micro_batches={a} contradicts num_microbatches={b}; they are two names for one setting")
    return ("n_micro_batches", a) if b is None else ("num_microbatches", b)


def schedule_of(config: RunConfig) -> tuple[str, int]:
    """Return the schedule and number of micro-batches that *config* stands for; plain is GPipe with one."""
    if config.pipeline.use_gpipe:
        return "gpipe", config.pipeline.n_micro
    if config.pipeline.schedule is None:
        return "gpipe", 1
    return config.pipeline.schedule, config.pipeline.n_micro


def note_names(config: RunConfig, optimizer: Any, criterion: Any, *, has_config: bool) -> None:
    """Let the resolved configuration show what is trained with, where that can be written down.

    Raises:
        ConfigError: It is nowhere said how to train.
    """
    if optimizer is None and not has_config:
        raise ConfigError('train: no optimizer; give one such as {"name": "SGD", "params": {"lr": 0.1}}')
    if criterion is None and not has_config:
        raise ConfigError('train: no criterion; give one such as "cross_entropy"')
    if isinstance(optimizer, (str, Mapping)):
        assign(config.training, "optimizer", optimizer, argument="optimizer")
    if isinstance(criterion, (str, Mapping)):
        assign(config.training, "criterion", criterion, argument="criterion")


def check_model(model: nn.Module, options: TrainingOptions) -> None:
    """Raise `ConfigError` if the optimizer does not suit the model, or nothing of it can be trained."""
    options.optimizer.check(list(model.named_parameters()))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("train: no parameter of the model requires a gradient, so there is nothing to train")


def build_options(
    config: RunConfig,
    *,
    optimizer: Any,
    criterion: Any,
    scheduler: Any,
    num_stages: int,
    shared_inputs: tuple[str, ...] = (),
) -> TrainingOptions:
    """Build everything that training needs, so that whatever is wrong is said before it starts.

    Raises:
        ConfigError: An optimizer, criterion, scheduler or schedule is unknown or has impossible parameters.
    """
    training = config.training
    optimizer_spec = build_optimizer_spec(training.optimizer if optimizer is None else optimizer)
    schedule, num_microbatches = schedule_of(config)
    generate(schedule, num_stages, num_microbatches)
    return TrainingOptions(
        optimizer=optimizer_spec,
        criterion=build_criterion(training.criterion if criterion is None else criterion),
        scheduler=build_scheduler_spec(
            training.scheduler if scheduler is None else scheduler, optimizer=optimizer_spec
        ),
        schedule=schedule,
        num_microbatches=num_microbatches,
        accumulate=training.accumulate,
        max_grad_norm=training.max_grad_norm,
        recompute=training.recompute,
        batch_norm=training.batch_norm,
        mixed_precision=training.mixed_precision,
        seed=training.seed,
        shared_inputs=shared_inputs,
    )

"""Metrics of an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from torchslicer.errors import CallbackError, ConfigError, DataError, UserError, nearest
from torchslicer.pipeline.batch import describe
from torchslicer.pipeline.criterion import Criterion

MetricFunction = Callable[[Any, Any], "float | torch.Tensor"]


@runtime_checkable
class StatefulMetric(Protocol):
    """The protocol of torchmetrics and its like."""

    def update(self, output: Any, target: Any) -> None:
        """Take a batch in."""

    def compute(self) -> Any:
        """Return the value over all batches."""

    def reset(self) -> None:
        """Forget all batches."""


MetricSpec = Mapping[str, "MetricFunction | StatefulMetric"] | Sequence[str] | None


def accuracy(output: Any, target: Any) -> float:
    """Share of right classes: *output* scores ``(B, C, ...)``, *target* classes ``(B, ...)``.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    0.5

    Raises:
        DataError: Shapes or types do not fit.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        raise DataError(
            f"metric accuracy: expected tensors, got {describe(output)} and {describe(target)}; pass a function of "
            'your own, such as metrics={"accuracy": lambda output, target: ...}'
        )
    if output.dim() < 2 or output.shape[:1] + output.shape[2:] != target.shape:
        raise DataError(
            "metric accuracy: expected scores (B, C, ...) and classes (B, ...), got "
            f"{tuple(output.shape)} and {tuple(target.shape)}; pass a function of your own for other forms"
        )
    return float((output.argmax(1) == target).float().mean())


_BY_NAME: dict[str, MetricFunction] = {"accuracy": accuracy}


def resolve_metrics(spec: MetricSpec) -> dict[str, MetricFunction | StatefulMetric]:
    """Return metrics by name from what a user may give: names, or a dictionary of functions and stateful metrics.

    Raises:
        ConfigError: A name is unknown, or a value cannot be called.
    """
    if spec is None:
        return {}
    if isinstance(spec, str):
        spec = [spec]
    if not isinstance(spec, Mapping):
        return {name: _known(name) for name in spec}
    for name, metric in spec.items():
        if isinstance(metric, type) or not (callable(metric) or isinstance(metric, StatefulMetric)):
            raise ConfigError(
                f"metrics: '{name}' must be a function (output, target), or an object (not a class) that has "
                f"update/compute/reset; got {metric!r}"
            )
    return dict(spec)


def check_metrics(spec: MetricSpec, eval_loader: object) -> None:
    """Check, before anything is trained, what ``train`` is to measure after each epoch.

    Raises:
        ConfigError: As `resolve_metrics`, or there is nothing to measure it on.
    """
    resolve_metrics(spec)
    if spec and eval_loader is None:
        raise ConfigError(
            "train: metrics= are for an evaluation after each epoch, and there is no eval_loader=; give one, or leave "
            "metrics= to sliced.evaluate(loader, metrics=...)"
        )


def _known(name: str) -> MetricFunction:
    if name not in _BY_NAME:
        raise ConfigError(
            f"metrics: unknown name {name!r}{nearest(str(name), _BY_NAME)} (known: {', '.join(sorted(_BY_NAME))}); "
            'others are given as functions: metrics={"name": lambda output, target: ...}'
        )
    return _BY_NAME[name]


class Totals:
    """Sums up an evaluation, batch by batch.

    A plain function's values are averaged over samples. The loss is what the criterion would give on all batches
    at once: weighted by what it divides by, or added up for ``reduction="sum"``.
    """

    def __init__(self, metrics: Mapping[str, MetricFunction | StatefulMetric]) -> None:
        self._metrics = metrics
        self._sums = dict.fromkeys(metrics, 0.0)
        self._loss = self._count = 0.0
        self._has_loss = False
        self.samples = 0
        for metric in metrics.values():
            if isinstance(metric, StatefulMetric):
                metric.reset()

    def add(self, output: Any, target: Any, size: int) -> None:
        """Take the output of a batch in."""
        self.samples += size
        for name, metric in self._metrics.items():
            with _named(name):
                if isinstance(metric, StatefulMetric):
                    metric.update(output, target)
                else:
                    self._sums[name] += float(metric(output, target)) * size

    def add_loss(self, loss: float, criterion: Criterion, target: Any, size: int) -> None:
        """Take the loss of a batch in."""
        count = criterion.count(target, size)
        weight = 1.0 if count is None else float(count)
        self._has_loss = True
        if weight:
            self._loss += loss * weight
        self._count = 1.0 if count is None else self._count + weight

    def compute(self) -> dict[str, float]:
        """Return the metrics over everything taken in."""
        result = {"loss": self._loss / self._count if self._count else float("nan")} if self._has_loss else {}
        for name, metric in self._metrics.items():
            with _named(name):
                mean = self._sums[name] / max(self.samples, 1)
                result[name] = float(metric.compute() if isinstance(metric, StatefulMetric) else mean)
        return result


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's metric may raise anything; it goes on with the metric's name
        raise CallbackError(f"metric '{name}': {type(error).__name__}: {error}") from error

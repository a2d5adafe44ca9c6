"""BatchNorm under micro-batches.

Each micro-batch is normalised by its own statistics; that is what micro-batching means. The *running* statistics may
either follow every micro-batch (as plain PyTorch does at each call) or be deferred: collected over the micro-batches
and applied once a step, as if the whole batch had been seen (torchgpipe, arXiv 2004.09910, section 3.2 "deferred
batch normalization").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def training_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm modules of *model* that would update running statistics, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    }


class DeferredStatistics:
    """Collects, for every BatchNorm, the statistics of a step and applies them at its end."""

    def __init__(self, modules: dict[str, _BatchNorm]) -> None:
        self.modules = modules
        self._sums: dict[_BatchNorm, Statistics] = {}
        self._paused = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the modules; their own updates are off meanwhile."""
        handles = []
        for module in self.modules.values():
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._sums.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Collect nothing for a while (recomputation sees a micro-batch for the second time)."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, _BatchNorm)
        if not module.training:
            return
        module.track_running_stats = False
        if self._paused:
            return
        inputs = (args[0] if args else kwargs["input"]).detach()
        self._sums[module] = _joined(self._sums.get(module), _statistics(inputs))

    def _after(self, module: nn.Module, *_: Any) -> None:
        assert isinstance(module, _BatchNorm)
        module.track_running_stats = True

    @torch.no_grad()
    def apply(self) -> None:
        """Update the running statistics by those of the whole step, once."""
        for module, (count, mean, squares) in self._sums.items():
            if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
                continue
            module.num_batches_tracked.add_(1)
            momentum = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked)
            variance = squares / max(count - 1, 1)
            module.running_mean.mul_(1 - momentum).add_(mean.to(module.running_mean) * momentum)
            module.running_var.mul_(1 - momentum).add_(variance.to(module.running_var) * momentum)
        self._sums.clear()


Statistics = tuple[int, torch.Tensor, torch.Tensor]
"""Number of values of a channel, their mean, and the sum of their squared distances from it."""


def _statistics(inputs: torch.Tensor) -> Statistics:
    over = [dim for dim in range(inputs.dim()) if dim != 1]
    values = inputs if inputs.dtype == torch.float64 else inputs.float()
    count = inputs.numel() // inputs.shape[1]
    variance, mean = torch.var_mean(values, over, correction=0)
    return count, mean.double(), variance.double() * count


def _joined(known: Statistics | None, new: Statistics) -> Statistics:
    """Join the statistics of two sets of values (Chan, Golub and LeVeque, 1979): no large squares are subtracted."""
    if known is None:
        return new
    count = known[0] + new[0]
    apart = new[1] - known[1]
    mean = known[1] + apart * (new[0] / count)
    return count, mean, known[2] + new[2] + apart.square() * (known[0] * new[0] / count)

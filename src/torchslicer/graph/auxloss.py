"""Auxiliary losses: a module adds one inside its ``forward``; whoever runs the module collects them.

The collector is a context variable, so runs in different threads do not see each other's losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.fx import Proxy

from torchslicer.errors import UserError

_collector: ContextVar[list[tuple[torch.Tensor, float]] | None] = ContextVar("torchslicer_aux_losses", default=None)


def add_aux_loss(loss: torch.Tensor | Proxy, weight: float = 1.0) -> None:
    """Add ``weight * loss`` to what is trained on; outside a collector nothing happens.

    Call it inside the ``forward`` of any module.

    Args:
        loss: A tensor without dimensions.
        weight: Its factor.

    Raises:
        UserError: If *loss* is not a tensor without dimensions.

    Example:
        >>> with collect_aux_losses() as losses:
        ...     add_aux_loss(torch.tensor(2.0), 0.5)
        >>> losses
        [(tensor(2.), 0.5)]
    """
    if isinstance(loss, Proxy):  # the model is being traced: the call becomes a node of its graph
        loss.tracer.create_proxy("call_function", add_aux_loss, (loss, weight), {})
        return
    # Also checked outside a collector: a tracer's stand-in for a tensor must not vanish without a word.
    if not isinstance(loss, torch.Tensor):
        raise UserError(f"an auxiliary loss must be a tensor, got {type(loss).__name__}")
    if loss.dim() != 0:
        raise UserError(
            f"an auxiliary loss must be a single number, got shape {tuple(loss.shape)}; reduce it by .mean() or .sum()"
        )
    losses = _collector.get()
    if losses is not None:
        losses.append((loss, float(weight)))


def is_collected() -> bool:
    """Whether somebody collects auxiliary losses now."""
    return _collector.get() is not None


@contextmanager
def collect_aux_losses() -> Iterator[list[tuple[torch.Tensor, float]]]:
    """Collect the auxiliary losses added inside the ``with`` block as ``(loss, weight)`` pairs, in order.

    An inner collector keeps its losses from the outer one.
    """
    losses: list[tuple[torch.Tensor, float]] = []
    token = _collector.set(losses)
    try:
        yield losses
    finally:
        _collector.reset(token)

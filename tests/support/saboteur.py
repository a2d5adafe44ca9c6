"""A layer that does harm in worker processes, and a model with one in the stage of one's choice."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchslicer.cluster.links import Links
from torchslicer.transport.frame import Frame, FrameHeader

NUM_STAGES = 3
WIDTH = 8
_PASSES: Counter[str] = Counter()


class UnprintableError(Exception):
    """An error as users write them at worst."""

    rank = "not a number"

    def __str__(self) -> str:
        raise RuntimeError("no text either")


class Saboteur(nn.Module):
    """Passes its input on, but in the *at*-th pass of a process other than the one it was made in it does *harm*."""

    def __init__(self, harm: str, at: int = 3, seconds: float = 0.0) -> None:
        super().__init__()
        self.harm = harm
        self.at = at
        self.seconds = seconds
        self.home = os.getpid()
        self.token = os.urandom(8).hex()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > float("inf")) or os.getpid() == self.home:  # what cannot be traced stays one unit
            return x * 1.0
        if self.harm == "backward":
            return _Boom.apply(x, self.token, self.at)
        _PASSES[self.token] += 1
        if _PASSES[self.token] == self.at:
            return self._act(x)
        return x * 1.0

    def _act(self, x: torch.Tensor) -> torch.Tensor:
        if self.harm == "raise":
            raise ValueError("boom")
        if self.harm == "unprintable":
            raise UnprintableError
        if self.harm == "exit":
            sys.exit(3)
        if self.harm == "surrogate":
            raise ValueError("half a character \udc80")
        if self.harm == "width":
            return x[:, :-1] @ torch.ones(WIDTH, WIDTH)
        if self.harm == "nan":
            return x * float("nan")
        if self.harm in ("SIGKILL", "SIGSTOP", "SIGTERM"):
            os.kill(os.getpid(), getattr(signal, self.harm))
        if self.harm == "links":
            break_links()
        if self.harm in GHOSTS:
            haunt(open_links(), GHOSTS[self.harm])
        if self.seconds:
            spend(self.seconds, self.harm)
        return x * 1.0


class _Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: str, at: int) -> torch.Tensor:
        ctx.token, ctx.at = token, at
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _PASSES[ctx.token] += 1
        if _PASSES[ctx.token] == ctx.at:
            raise ValueError("boom")
        return gradient, None, None


def open_links() -> Links:
    """Return the links of this process's run."""
    gc.collect()  # the links of runs that are over, perhaps over gRPC, would be found too; or they are still closing
    # isinstance asks objects for their __class__, and some of them answer
    [found] = [thing for thing in gc.get_objects() if type(thing) is Links and not thing._closing]
    return found


def break_links() -> None:
    """Break the connections to the other ranks of this process, not that to the coordinator."""
    for rank, channel in open_links()._channels.items():
        if rank >= 0:
            channel._stream.shut(reading=True)  # type: ignore[attr-defined]


def haunt(links: Links, names: Callable[[FrameHeader], Mapping[str, int]]) -> None:
    """Send with every frame one of other content before it and after it, under other *names*."""
    send = links.send

    def haunted(rank: int, frames: Iterable[Frame]) -> None:
        for frame in frames:
            ghost = Frame(frame.header._replace(**names(frame.header)), _other(frame.payload))
            send(rank, [ghost, frame, ghost])

    links.send = haunted  # type: ignore[method-assign]


def _other(payload: torch.Tensor | bytes) -> torch.Tensor | bytes:
    return payload if isinstance(payload, bytes) else torch.full_like(payload, 7)


GHOSTS: dict[str, Callable[[FrameHeader], Mapping[str, int]]] = {
    "old": lambda header: {"generation": header.generation - 1},
    "later": lambda header: {"generation": header.generation + 1},
    "foreign": lambda header: {"run": header.run ^ 1},
}
"""Frames that belong to another run."""


def spend(seconds: float, how: str) -> None:
    """Sleep, compute in a loop that Python interprets ("busy"), or keep the interpreter's lock ("hold")."""
    end, value = time.monotonic() + seconds, 1
    if how == "hold":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the lock
    while how == "busy" and time.monotonic() < end:
        for _ in range(10_000):
            value = value * 31 % 1_000_003
    time.sleep(max(end - time.monotonic(), 0.0))


def model_with(harm: nn.Module | None = None, stage: int = 1) -> nn.Sequential:
    """Return a model of three stages of which one has a saboteur."""
    layers: list[nn.Module] = []
    for index in range(NUM_STAGES):
        layers += [nn.Linear(WIDTH, WIDTH), harm if harm is not None and index == stage else nn.Tanh()]
    return nn.Sequential(*layers)


def batches(count: int = 6, samples: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches for it."""
    return [(torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)) for _ in range(count)]

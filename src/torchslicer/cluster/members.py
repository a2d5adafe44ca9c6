"""What a coordinator knows of a worker, and how it words what a worker failed with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchslicer import errors
from torchslicer.cluster.control import Control
from torchslicer.cluster.messages import Failed, Hello
from torchslicer.errors import StageError, TorchSlicerError, WorkerFailureError
from torchslicer.transport.address import in_words
from torchslicer.transport.base import Channel


@dataclass(frozen=True)
class Liveness:
    """How quickly a silent worker is given up."""

    interval_s: float = 5.0
    timeout_s: float = 3.0

    @property
    def limit_s(self) -> float:
        """How long a worker may be silent."""
        return self.interval_s + self.timeout_s


class Attachable(Protocol):
    """Where data connections to a worker of this process are made."""

    def attach(self) -> Channel:
        """Return this end of a new one."""


@dataclass(eq=False)
class Member:
    """A worker that has registered.

    Attributes:
        hello: What it said of itself.
        control: The channel to it.
        inner: Where data connections to it are made, if it is in this process.
        lost: Why it is gone, once it is.
        dialled: The address under which the coordinator reached it, where it did not register by itself.
        busy: Generation of the run that it was given and has not let go of.
        stage: The stage that it holds in the current run, or held in the last.
        doing: What it said in its last heartbeat that it is doing.
        dismissed: Whether it is being ended from here, so that its going is no news.
    """

    hello: Hello
    control: Control
    inner: Attachable | None = None
    lost: TorchSlicerError | None = None
    dialled: str | None = None
    busy: int | None = None
    stage: int | None = None
    doing: str = field(default="", repr=False)
    dismissed: bool = field(default=False, repr=False)

    @property
    def node(self) -> str:
        """Its name."""
        return self.hello.node

    @property
    def available(self) -> bool:
        """Whether it is there and has nothing to do."""
        return self.lost is None and self.busy is None

    def __str__(self) -> str:
        return f"worker '{self.node}' ({in_words(self.control.peer)})"

    @property
    def with_stage(self) -> str:
        """Its stage, its name and its address, or its process where it is on this host."""
        return str(self) if self.stage is None else f"stage {self.stage} on {self}"


def share_threads(members: Sequence[Member]) -> dict[str, int]:
    """Return how many threads each of a run's *members* uses: as many as it was told to use, or a share of its host.

    The workers of a host that were told nothing share the cores that the others leave, equally, and get one at least.
    """
    shares: dict[str, int] = {}
    for host in {member.hello.host for member in members}:
        here = [member.hello for member in members if member.hello.host == host]
        sharing = [hello for hello in here if not hello.threads]
        free = min(hello.cores for hello in here) - sum(hello.threads for hello in here)
        shares |= {hello.node: hello.threads or max(free // len(sharing), 1) for hello in here}
    return shares


def loss_of(member: Member) -> WorkerFailureError:
    """Return the error of a run that lost a worker."""
    return WorkerFailureError(
        f"{member.with_stage} failed: {member.lost}. The other workers are free for another run; look at the log of "
        f"'{member.node}' for what ended it"
    )


def stall_of(members: Sequence[Member], missing: Sequence[Member], what: str, timeout_s: float) -> WorkerFailureError:
    """Return the error of a run in which nothing has come for too long.

    Whoever computes is to blame, if anybody does; the others wait.
    """
    computing = [member for member in members if member.doing.startswith("computes")]
    named = " and ".join(member.with_stage for member in computing or missing)
    said = "".join(f"\n  {member.with_stage} {member.doing or 'has not said what it does'}" for member in members)
    return WorkerFailureError(
        f"{named}: nothing came from any worker for {timeout_s:g} s (awaited: {what}), though all are alive:{said}\n"
        "If a step may take that long, raise stall_timeout_s"
    )


def remote_error(member: Member, failed: Failed) -> TorchSlicerError:
    """Return the error that a worker told of, as the class that it had there, with the traceback that it had there."""
    if failed.error == "NonFiniteLossError":
        return errors.NonFiniteLossError(failed.message)
    kind = getattr(errors, failed.error, StageError)
    if not (isinstance(kind, type) and issubclass(kind, TorchSlicerError)):
        kind = StageError
    if failed.lost_peer is not None or issubclass(kind, (errors.TransportError, errors.ProtocolError)):
        kind = WorkerFailureError
    text = re.sub(rf"^stage {member.stage}, ", "", failed.message)
    trace = f"\n\nTraceback on the worker:\n{failed.traceback.rstrip()}" if failed.traceback else ""
    return kind(f"{member.with_stage}: {text}{trace}")


def missing_workers(
    count: int, live: Sequence[Member], timeout_s: float, *, where: str, how: str, refused: Sequence[str]
) -> WorkerFailureError:
    """Return the error for too few workers: who is there, who was turned away, how to start more."""
    free = [member for member in live if member.busy is None]
    here = ", ".join(map(str, free)) or "none"
    lines = [f"{count} workers are needed, {len(free)} registered{where} within {timeout_s:g} s: {here}"]
    lines += [
        f"  {member} is there too, but has not let go of the run before: it {member.doing or 'is busy'}"
        for member in live
        if member.busy is not None
    ]
    lines += [f"  not taken in: {reason}" for reason in refused]
    return WorkerFailureError("\n".join([*lines, f"Start more with: {how}"]))

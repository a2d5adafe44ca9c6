"""A worker's part in a run as all its threads see it: one computes, any other may end it at any moment."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torchslicer.cluster.hub import Attachments, open_link, run_number
from torchslicer.cluster.links import COORDINATOR, Links, RunKey
from torchslicer.cluster.mailbox import Mailbox
from torchslicer.cluster.messages import Assign, Attach, Failed, Peer, Scale
from torchslicer.cluster.packing import Key
from torchslicer.cluster.security import COORDINATOR as COORDINATOR_NODE
from torchslicer.cluster.security import Protection
from torchslicer.errors import (
    DeadlineError,
    FrameError,
    ProtocolError,
    RunError,
    StageError,
    TorchSlicerError,
    TransportError,
    WorkerFailureError,
)
from torchslicer.transport.base import Channel
from torchslicer.transport.frame import FrameKind

LINK_TIMEOUT_S = 30.0
_POLL_S = 0.2
_MAX_TEXT = 60_000


class RunAbortedError(RunError):
    """The coordinator gave the run up."""


class PeerLostError(RunError):
    """A channel to another rank broke, or never came about."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class _Peers:
    """Who the other ranks are, for messages."""

    nodes: dict[int, str]

    def __call__(self, rank: int) -> str:
        return "the coordinator" if rank == COORDINATOR else f"stage {rank} (worker '{self.nodes.get(rank, '?')}')"


class Assignment:
    """What the coordinator has given to this worker, and the channels and the mailbox of that run.

    Args:
        message: The coordinator's word.
        hub: Where the others connect to.
        protection: Of the connections that are made from here.
    """

    def __init__(self, message: Assign, hub: Attachments, protection: Protection) -> None:
        self.message = message
        self.generation = message.generation
        # The coordinator is to give up first: it sees all workers, and says who did not go on.
        self.mailbox = Mailbox(1.5 * message.stall_timeout_s)
        key = RunKey(run_number(message.run_id, message.secret), message.generation)
        self.links = Links(key, self.mailbox, on_lost=self._lost, send_timeout_s=1.5 * message.stall_timeout_s)
        self.told = False
        """Whether the coordinator knows that the run has failed here."""
        self._hub, self._protection = hub, protection
        self._nodes = {COORDINATOR: COORDINATOR_NODE, **{peer.rank: peer.node for peer in message.peers}}
        self._names = _Peers({peer.rank: peer.node for peer in message.peers})
        self._doing, self._since = "prepares its stage", time.monotonic()

    # -- for any thread --------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End the run: whatever waits here, now or later, raises *error*."""
        self.mailbox.fail(error)

    def put_scale(self, message: Scale) -> None:
        """Hand the computing thread the factor that it waits for."""
        self.mailbox.put(_scale_key(message.step), message)

    @property
    def doing(self) -> str:
        """What the computing thread is at, in words."""
        waits_for = self.mailbox.waits_for
        verb = f"waits for {waits_for}" if waits_for else self._doing
        return f"{verb} (for {time.monotonic() - self._since:.0f} s)"

    # -- for the thread that computes ------------------------------------------------------------------------

    def now(self, doing: str) -> None:
        """Note what is being done."""
        self._doing, self._since = doing, time.monotonic()

    def ask_scale(self, step: int) -> Scale:
        """Wait for the factor of a step's gradients."""
        [message] = self.mailbox.take([_scale_key(step)])
        return message  # type: ignore[no-any-return]

    def link(self) -> None:
        """Connect to the ranks above, and take the connections of those below and of the coordinator.

        Raises:
            PeerLostError: One of them cannot be reached, or did not come.
        """
        above = [rank for rank in sorted(self.message.links) if rank > self.message.rank]
        below = [rank for rank in sorted(self.message.links) if rank < self.message.rank]
        peers = {peer.rank: peer for peer in self.message.peers}
        for rank in above:
            self._join(rank, partial(self._opened, peers[rank]))
        for rank in (COORDINATOR, *below):
            self._join(rank, partial(self._taken, rank))

    def _join(self, rank: int, connect: Callable[[], Channel]) -> None:
        try:
            channel = connect()
        except TransportError as error:
            self.mailbox.check()
            raise PeerLostError(f"no connection to {self._names(rank)}: {error}", max(rank, 0)) from error
        self.links.add(rank, channel)

    def _opened(self, peer: Peer) -> Channel:
        message = self.message
        attach = Attach(run_id=message.run_id, generation=message.generation, rank=message.rank, secret=message.secret)
        channel, _ = open_link(
            peer.endpoints, peer.host, attach, node=peer.node, transport=message.transport,
            protection=self._protection, timeout_s=LINK_TIMEOUT_S, check=self.mailbox.check,
        )  # fmt: skip
        return channel

    def _taken(self, rank: int) -> Channel:
        """Wait for a rank's connection, and look from time to time whether the run still lasts."""
        message, deadline = self.message, time.monotonic() + LINK_TIMEOUT_S
        while True:
            try:
                return self._hub.take(
                    message.run_id, message.generation, rank, node=self._nodes[rank], secret=message.secret,
                    timeout_s=_POLL_S,
                )  # fmt: skip
            except DeadlineError:
                self.mailbox.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(f"it did not connect within {LINK_TIMEOUT_S:.0f} s") from None

    def close(self) -> None:
        """Forget the run; connections for it that nobody took are closed too."""
        self.links.close()
        self.mailbox.fail(RunAbortedError("the run is over"))
        if self.mailbox.failure is not None:
            self.mailbox.failure.__traceback__ = None  # its frames hold the stage
        self._hub.forget(self.message.run_id)

    def _lost(self, rank: int, error: TorchSlicerError) -> None:
        words = f"the connection to {self._names(rank)} broke: {error}"
        # Who refuses what came knows the cause; to the one that sent it, it is only a connection that ended.
        refused = isinstance(error, (FrameError, ProtocolError))
        self.mailbox.fail(WorkerFailureError(words) if refused else PeerLostError(words, max(rank, 0)))


def _scale_key(step: int) -> Key:
    return (FrameKind.CONTROL, step, 0, 0, 0)


def failure_message(assignment: Assignment, error: BaseException) -> Failed:
    """Return what to tell the coordinator of an error."""
    of_ours = isinstance(error, TorchSlicerError)
    cause = error.__cause__ if isinstance(error, StageError) and error.__cause__ is not None else error
    lost = error.rank if isinstance(error, PeerLostError) else None
    with_trace = lost is None and not isinstance(error, WorkerFailureError)
    try:
        text = str(error) if of_ours else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the error is the user's, and so is its __str__
        text = f"{type(error).__name__} (which cannot be printed)"
    trace = traceback.format_exception(type(cause), cause, cause.__traceback__) if with_trace else []
    return Failed(
        generation=assignment.generation,
        stage=assignment.message.rank,
        error=type(error).__name__ if of_ours else "StageError",
        message=_sendable(text),
        traceback=_sendable("".join(trace)),
        lost_peer=lost,
    )


def _sendable(text: str) -> str:
    """Return text that fits a message: not too long (the end of a traceback says most), no half characters."""
    whole = text.encode(errors="replace").decode()
    return whole if len(whole) <= _MAX_TEXT else whole[:1000] + "\n...\n" + whole[-(_MAX_TEXT - 2000) :]

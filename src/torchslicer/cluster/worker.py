"""A worker: it offers itself to a coordinator, holds the stages it is given, and serves run after run."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchslicer.cluster.control import Control
from torchslicer.cluster.hub import Hub, TlsMaterial, open_link, run_number
from torchslicer.cluster.links import COORDINATOR, Links, RunKey
from torchslicer.cluster.mailbox import Mailbox
from torchslicer.cluster.messages import (
    PROTOCOL,
    Abort,
    Assign,
    Attach,
    Failed,
    Heartbeat,
    Hello,
    Peer,
    Ready,
    Refused,
    Release,
    Released,
    Scale,
    Shutdown,
    Welcome,
)
from torchslicer.cluster.part import decode_part
from torchslicer.cluster.session import RankSession
from torchslicer.errors import DeadlineError, PeerClosedError, ProtocolError, RunError, StageError, TorchSlicerError
from torchslicer.transport.address import host_id
from torchslicer.transport.base import Channel
from torchslicer.transport.frame import FrameKind
from torchslicer.version import __version__

logger = logging.getLogger("torchslicer.worker")

LINK_TIMEOUT_S = 30.0
CPU = torch.device("cpu")


class RunAbortedError(RunError):
    """The coordinator gave the run up."""


@dataclass(frozen=True)
class WorkerSettings:
    """Who a worker is.

    Attributes:
        node: Its name; stages are given out in the order of names.
        device: Where its stages compute.
        threads: Threads of torch; 0 lets the coordinator share the host's cores among its workers.
        tags: What a coordinator may ask for.
        trusted: Packages whose classes and functions may be used, beside torch's and the library's own.
    """

    node: str
    device: torch.device = CPU
    threads: int = 0
    tags: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()


@dataclass
class _Connection:
    """One connection to a coordinator, and what is read from it."""

    control: Control
    welcome: Welcome
    commands: queue.SimpleQueue[tuple[Any, list[torch.Tensor]]] = field(default_factory=queue.SimpleQueue)
    last_seen: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)


class Worker:
    """Serves one coordinator after the other.

    Args:
        settings: Who it is.
        hub: Where it takes data connections.
        tls: For the connections that it makes.
    """

    def __init__(self, settings: WorkerSettings, hub: Hub, *, tls: TlsMaterial | None = None) -> None:
        self.settings = settings
        self.hub = hub
        self.tls = tls
        self.stopping = threading.Event()
        self._mailbox: Mailbox | None = None
        self._connection: _Connection | None = None

    def serve(self, channel: Channel) -> None:
        """Introduce this worker on *channel* and do what comes, until the connection ends or a shutdown is asked for.

        Raises:
            ProtocolError: The coordinator refused this worker.
            TransportError: The coordinator did not answer.
        """
        control = Control(channel)
        control.send(self._hello())
        answer = control.receive(timeout_s=LINK_TIMEOUT_S)
        if isinstance(answer, Refused):
            raise ProtocolError(f"the coordinator at {control.peer} refused this worker: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the coordinator at {control.peer} answered with {type(answer).__name__}")
        logger.info("registered with the coordinator at %s for run %s", control.peer, answer.run_id)
        connection = self._connection = _Connection(control, answer)
        with _threads(connection, self._read, self._beat):
            self._work(connection)

    def stop(self) -> None:
        """End at the next opportunity; a run in progress fails."""
        self.stopping.set()
        if self._mailbox is not None:
            self._mailbox.fail(RunAbortedError("the worker was told to stop"))
        if self._connection is not None:
            self._connection.commands.put((None, []))

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            version=__version__,
            torch_version=torch.__version__,
            node=self.settings.node,
            host=host_id(),
            device=str(self.settings.device),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            threads=self.settings.threads,
            tags=list(self.settings.tags),
            endpoints=list(self.hub.endpoints),
            trusted=list(self.settings.trusted),
        )

    # -- threads that read and beat --------------------------------------------------------------------------

    def _read(self, connection: _Connection) -> None:
        control = connection.control
        try:
            while not connection.ended.is_set():
                try:
                    message = control.receive(timeout_s=1.0)
                except DeadlineError:
                    self._check_silence(connection)
                    continue
                connection.last_seen = time.monotonic()
                self._dispatch(connection, message)
        except TorchSlicerError as error:
            if not connection.ended.is_set():
                logger.info("the connection to the coordinator ended: %s", error)
            self._fail_waits(PeerClosedError(f"the coordinator is gone: {error}"))
        finally:
            connection.commands.put((None, []))

    def _check_silence(self, connection: _Connection) -> None:
        silent_s = time.monotonic() - connection.last_seen
        if silent_s > connection.welcome.heartbeat_timeout_s + connection.welcome.heartbeat_interval_s:
            raise PeerClosedError(f"no sign of life from the coordinator for {silent_s:.0f} s")

    def _dispatch(self, connection: _Connection, message: Any) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Scale):
            if self._mailbox is not None:
                self._mailbox.put(_scale_key(message.step), message)
            return
        tensors: list[torch.Tensor] = []
        if isinstance(message, Assign):
            tensors = connection.control.receive_tensors(len(message.tensors), timeout_s=LINK_TIMEOUT_S)
            connection.last_seen = time.monotonic()
        if isinstance(message, Abort):
            self._fail_waits(RunAbortedError(message.reason))
        connection.commands.put((message, tensors))

    def _fail_waits(self, error: BaseException) -> None:
        if self._mailbox is not None:
            self._mailbox.fail(error)

    def _beat(self, connection: _Connection) -> None:
        with contextlib.suppress(TorchSlicerError):  # the reading thread notices, too
            while not connection.ended.wait(connection.welcome.heartbeat_interval_s):
                connection.control.send(Heartbeat(), timeout_s=connection.welcome.heartbeat_timeout_s)

    # -- the thread that computes ----------------------------------------------------------------------------

    def _work(self, connection: _Connection) -> None:
        session: RankSession | None = None
        try:
            while True:
                message, tensors = connection.commands.get()
                if message is None or isinstance(message, Shutdown):
                    if isinstance(message, Shutdown):
                        self.stopping.set()
                    return
                session = self._obey(connection, session, message, tensors)
        finally:
            self._close(session)

    def _obey(
        self, connection: _Connection, session: RankSession | None, message: Any, tensors: list[torch.Tensor]
    ) -> RankSession | None:
        if isinstance(message, (Release, Abort)):
            self._close(session)
            connection.control.send(Released(generation=message.generation))
            return None
        generation = getattr(message, "generation", 0)
        try:
            if isinstance(message, Assign):
                self._close(session)
                return self._begin(connection, message, tensors)
            if session is None or generation != session.generation:
                return session  # left over from a run that was given up
            session.handle(message)
        except RunAbortedError:
            self._close(session)
            return None
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a run is the coordinator's to tell
            self._close(session)
            self._report(connection, generation, error)
            return None
        return session

    def _close(self, session: RankSession | None) -> None:
        if session is not None:
            session.close()
        self._mailbox = None

    def _report(self, connection: _Connection, generation: int, error: Exception) -> None:
        logger.error("the run failed here: %s", error)
        cause = error.__cause__ or error
        text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
        failed = Failed(
            generation=generation,
            stage=-1,
            error=type(cause).__name__ if isinstance(error, StageError) else type(error).__name__,
            message=str(error)[:60_000],
            traceback=text[-60_000:],
            lost_peer=getattr(error, "rank", None),
        )
        with contextlib.suppress(TorchSlicerError):
            connection.control.send(failed)

    # -- the start of a run ----------------------------------------------------------------------------------

    def _begin(self, connection: _Connection, assign: Assign, tensors: Sequence[torch.Tensor]) -> RankSession:
        mailbox = Mailbox(assign.stall_timeout_s)
        self._mailbox = mailbox
        torch.set_num_threads(max(assign.threads, 1))
        named = dict(zip(assign.tensors, tensors, strict=True))
        part = decode_part(assign.description, named, device=self.settings.device, trusted=self.settings.trusted)
        key = RunKey(run_number(assign.run_id, assign.secret), assign.generation)
        links = Links(key, mailbox, on_lost=_losing(mailbox, assign.peers), send_timeout_s=assign.stall_timeout_s)
        try:
            self._link(assign, links)
            session = RankSession(
                part,
                links,
                tell=connection.control.send,
                ask=lambda step: mailbox.take([_scale_key(step)])[0],
            )
        except BaseException:
            links.close()
            raise
        connection.control.send(Ready(generation=assign.generation, threads=torch.get_num_threads()))
        return session

    def _link(self, assign: Assign, links: Links) -> None:
        """Connect to the ranks above, and take the connections of those below and of the coordinator."""
        peers = {peer.rank: peer for peer in assign.peers}
        attach = Attach(run_id=assign.run_id, generation=assign.generation, rank=assign.rank, secret=assign.secret)
        for rank in sorted(assign.links):
            if rank > assign.rank:
                channel, _ = open_link(
                    peers[rank].endpoints, peers[rank].host, attach, transport=assign.transport, tls=self.tls,
                    timeout_s=LINK_TIMEOUT_S,
                )  # fmt: skip
                links.add(rank, channel)
        for rank in [COORDINATOR, *(rank for rank in sorted(assign.links) if rank < assign.rank)]:
            links.add(rank, self._taken(assign, rank))

    def _taken(self, assign: Assign, rank: int) -> Channel:
        return self.hub.take(assign.run_id, assign.generation, rank, secret=assign.secret, timeout_s=LINK_TIMEOUT_S)


class PeerLostError(RunError):
    """A channel to another rank broke."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def _losing(mailbox: Mailbox, peers: Sequence[Peer]) -> Any:
    names = {peer.rank: peer.node for peer in peers}

    def on_lost(rank: int, error: TorchSlicerError) -> None:
        who = "the coordinator" if rank == COORDINATOR else f"rank {rank} ({names.get(rank, 'unknown')})"
        lost = PeerLostError(f"the connection to {who} broke: {error}", max(rank, 0))
        mailbox.fail(lost if rank != COORDINATOR else RunAbortedError(str(lost)))

    return on_lost


def _scale_key(step: int) -> tuple[FrameKind, int, int, int, int]:
    return (FrameKind.CONTROL, step, 0, 0, 0)


@contextlib.contextmanager
def _threads(connection: _Connection, *targets: Any) -> Iterator[None]:
    threads = [
        threading.Thread(target=target, args=(connection,), name=f"torchslicer{target.__name__}", daemon=True)
        for target in targets
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        connection.ended.set()
        connection.control.close()
        for thread in threads:
            thread.join(timeout=5.0)

"""The coordinator's side: which workers there are, what they say, and whether they are still alive."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchslicer.cluster.control import Control
from torchslicer.cluster.door import KNOWN, STRANGER, Complaints, Door
from torchslicer.cluster.hub import PLAIN, check_peer, check_reachable
from torchslicer.cluster.inbox import Inbox
from torchslicer.cluster.members import Attachable, Liveness, Member, loss_of, missing_workers
from torchslicer.cluster.messages import (
    PROTOCOL,
    Failed,
    Heartbeat,
    Hello,
    Refused,
    Released,
    Shutdown,
    State,
    Welcome,
)
from torchslicer.cluster.security import Protection
from torchslicer.errors import (
    DeadlineError,
    PeerClosedError,
    ProtocolError,
    TorchSlicerError,
    TransportError,
    WorkerFailureError,
)
from torchslicer.transport.base import Channel, Listener
from torchslicer.version import __version__

if TYPE_CHECKING:
    from torchslicer.cluster.security import JoinGate  # needs cryptography, an extra

__all__ = ["Coordinator", "Liveness", "Member"]

logger = logging.getLogger("torchslicer.coordinator")

HELLO_TIMEOUT_S = 5.0
"""A worker says who it is in the moment it has connected, with nothing to compute in between; a late one tries anew."""
_SAY_WHO_IS_MISSING_S = 5.0
_MAX_CALLERS = 64
_WHY_SILENT = (
    "(stopped, cut off, or running code that keeps the interpreter's lock: if that may last so long, raise "
    "fault_tolerance.ping_timeout_s)"
)


class Coordinator:
    """Takes workers in, hears what they say, and notices when they are gone.

    Args:
        run_id: The run that workers register for.
        liveness: How quickly a silent worker is given up.
        tag_filter: Workers must have all of these tags.
        protection: Of all connections but those through UNIX sockets.
        gate: Where workers join that have no certificate yet.
        hello_timeout_s: How long one that has connected may take to say who it is.
    """

    def __init__(
        self,
        run_id: str,
        *,
        liveness: Liveness | None = None,
        tag_filter: Sequence[str] = (),
        protection: Protection = PLAIN,
        gate: JoinGate | None = None,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self.run_id = run_id
        self.liveness = liveness or Liveness()
        self.tag_filter = tuple(tag_filter)
        self.protection = protection
        self.gate = gate
        self.hello_timeout_s = hello_timeout_s
        if gate is not None:
            gate.live = lambda: frozenset(member.node for member in self.live())
        self.members: dict[str, Member] = {}
        self.refused: deque[str] = deque(maxlen=20)
        self.how_to_start = ""
        """The command that starts a worker, for messages; made from the address if empty."""
        self._condition = threading.Condition()
        self.inbox = Inbox(self._condition)
        self._closed = threading.Event()
        self._ending = False
        self._listeners: list[Listener] = []
        self._door = Door(_MAX_CALLERS)
        self._complaints = Complaints(logger)
        self._threads: list[threading.Thread] = []
        self._start(self._watch)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"torchslicer{target.__name__}", daemon=True)
        with self._condition:
            self._threads = [thread, *(known for known in self._threads if known.is_alive())]
            thread.start()

    # -- membership ------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Take in workers that connect to *listener*; the coordinator closes it."""
        self._listeners.append(listener)
        self._start(self._accept, listener)

    def _accept(self, listener: Listener) -> None:
        while not self._closed.is_set():
            try:
                channel = listener.accept(timeout_s=1.0)
            except DeadlineError:
                continue
            except TransportError as error:
                if isinstance(error, PeerClosedError) or self._closed.wait(0.1):
                    return
                logger.warning("the listener on %s: %s", listener.address, error)
                continue
            self._door.greet(channel, self._greet)

    def _greet(self, channel: Channel) -> None:
        try:
            if self.gate is None or not self.gate.admit(channel):
                self.adopt(channel)
        except TorchSlicerError as error:
            channel.close(timeout_s=0)
            if not self._closed.is_set():
                self.refused.append(f"{channel.peer}: {error}")
                how = "" if self.protection.material is None else f"; a worker starts with: {self.how_to_start}"
                self._complaints.warn("a connection from %s was not taken in: %s%s", channel.peer, error, how)

    def adopt(self, channel: Channel, *, inner: Attachable | None = None) -> Member:
        """Take in the worker at the other end of *channel*; if it is not taken in, the channel is closed.

        *inner* is where data connections to it are made, if it is in this process.

        Raises:
            ProtocolError: It is no worker, of another version, or cannot be reached for data.
            TransportError: It did not introduce itself in time.
            SecurityError: Its certificate is for another node.
        """
        try:
            channel.limits = STRANGER
            member = self._introduced(Control(channel), inner)
            channel.limits = KNOWN
        except BaseException:
            channel.close()
            raise
        with self._condition:
            self.members[member.node] = member
            self._start(self._read, member)  # whoever is woken finds it read
            self._condition.notify_all()
        hello = member.hello
        threads = hello.threads or "shared with other workers of its host"
        logger.info("%s registered: %s, %d cores, threads: %s", member, hello.device, hello.cores, threads)
        return member

    def _introduced(self, control: Control, inner: Attachable | None) -> Member:
        hello = control.receive(timeout_s=self.hello_timeout_s)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"{control.peer} did not introduce itself as a worker")
        check_peer(control.channel, self.protection, hello.node)
        reason = self._reason_to_refuse(hello) or (None if inner is not None else self._unreachable(hello))
        if reason is not None:
            control.send(Refused(reason=reason), timeout_s=HELLO_TIMEOUT_S)
            raise ProtocolError(f"worker '{hello.node}' was refused: {reason}")
        limits = self.liveness
        welcome = Welcome(
            run_id=self.run_id, heartbeat_interval_s=limits.interval_s, heartbeat_timeout_s=limits.timeout_s
        )
        self._door.leave(control.channel)
        control.send(welcome, timeout_s=HELLO_TIMEOUT_S)
        return Member(hello, control, inner)

    def _reason_to_refuse(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL or hello.version != __version__:
            return f"it has torchslicer {hello.version}, the coordinator {__version__}; install the same on both"
        missing = [tag for tag in self.tag_filter if tag not in hello.tags]
        if missing:
            return f"it lacks the tag(s) {missing}; it has {list(hello.tags)}"
        return self._namesake(hello)

    def _namesake(self, hello: Hello) -> str | None:
        """Give up the connection that the same worker had before; wait a little for another of its name to be gone."""
        known = self.members.get(hello.node)
        if known is not None and hello.instance and known.hello.instance == hello.instance:
            self._lose(known, PeerClosedError("it connected anew"))
        with self._condition:
            gone = self._condition.wait_for(lambda: hello.node not in self.members, self.liveness.limit_s)
        if gone:
            return None
        return f"a worker of the name '{hello.node}' is registered already; start it with another --name"

    def _unreachable(self, hello: Hello) -> str | None:
        try:
            check_reachable(hello.endpoints, hello.host, self.run_id, node=hello.node, protection=self.protection)
        except TorchSlicerError as error:
            offered = ", ".join(endpoint.address for endpoint in hello.endpoints)
            return (
                f"it advertised {offered}, which the coordinator cannot reach: {error}; start it with --advertise HOST "
                "(or set WORKER_ADDRESS), a name or address that other machines can connect to"
            )
        return None

    def wait_for(self, count: int, *, timeout_s: float) -> list[Member]:
        """Return *count* workers that have nothing to do, in the order of their names, once there are so many.

        Raises:
            WorkerFailureError: They did not come within *timeout_s*.
        """
        return self._wait(count, timeout_s, lambda: [member for member in self.live() if member.available][:count])

    def wait_until_free(self, member: Member, *, timeout_s: float) -> None:
        """Wait until *member* has let go of an earlier run.

        Raises:
            WorkerFailureError: It did not within *timeout_s*, or is gone.
        """
        self._wait(1, timeout_s, lambda: [member] if member.available or member.lost is not None else [])
        if member.lost is not None:
            raise loss_of(member)

    def wait_until_heard(self, member: Member, *, timeout_s: float) -> None:
        """Wait until *member*, which was dialled, says that it serves this coordinator: until then it may hang up.

        Raises:
            WorkerFailureError: It did, or did not say anything within *timeout_s*.
        """
        with self._condition:
            self._condition.wait_for(lambda: member.doing or member.lost is not None, timeout_s)
        if not member.doing and member.lost is None:
            self._lose(member, DeadlineError(f"it did not say within {timeout_s:g} s that it serves this driver"))
        if member.lost is not None:
            raise loss_of(member)

    def _wait(self, count: int, timeout_s: float, found: Callable[[], list[Member]]) -> list[Member]:
        deadline = time.monotonic() + timeout_s
        next_word = time.monotonic() + _SAY_WHO_IS_MISSING_S
        with self._condition:
            while True:
                members = found()
                if len(members) >= count:
                    return members
                if self._closed.is_set():
                    raise WorkerFailureError("the executor was closed; make another one")
                now = time.monotonic()
                if now >= deadline:
                    raise self._missing(count, timeout_s)
                if now >= next_word:
                    logger.info("waiting for workers: %d of %d are here", len(members), count)
                    next_word = now + _SAY_WHO_IS_MISSING_S
                self._condition.wait(min(deadline, next_word) - now)

    def live(self) -> list[Member]:
        """Return the workers that are there, in the order of their names."""
        with self._condition:
            return [member for _, member in sorted(self.members.items()) if member.lost is None]

    def dismiss(self, nodes: Sequence[str]) -> None:
        """Take note that these workers are about to be ended from here: nobody need be warned that they go."""
        with self._condition:
            for member in self.members.values():
                member.dismissed = member.dismissed or member.node in nodes

    def _missing(self, count: int, timeout_s: float) -> TorchSlicerError:
        address = self._listeners[0].address if self._listeners else ""
        how = self.how_to_start or f"torchslicer worker --coordinator {address or 'HOST:PORT'}"
        where = f" at {address}" if address else ""
        return missing_workers(count, self.live(), timeout_s, where=where, how=how, refused=tuple(self.refused))

    # -- what workers say, and whether they live -------------------------------------------------------------

    def _read(self, member: Member) -> None:
        try:
            while not self._closed.is_set():
                with contextlib.suppress(DeadlineError):
                    self._hear(member, member.control.receive(timeout_s=1.0))
        except TorchSlicerError as error:
            self._lose(member, error)
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would leave the run waiting
            self._lose(member, ProtocolError(f"what it sent could not be read ({type(error).__name__}: {error})"))

    def _hear(self, member: Member, message: Any) -> None:
        if isinstance(message, Heartbeat):
            with self._condition:
                member.doing = message.doing
                self._condition.notify_all()
            return
        tensors: list[torch.Tensor] | None = []
        if isinstance(message, State):
            tensors = member.control.receive_tensors(len(message.tensors))
        with self._condition:
            if isinstance(message, Released) and message.generation == member.busy:
                member.busy = None
            if tensors is not None:
                self.inbox.put(member, message, tensors)
            self._condition.notify_all()
        if isinstance(message, Failed):
            self.inbox.trouble(member)

    def _lose(self, member: Member, error: TorchSlicerError) -> None:
        with self._condition:
            first = member.lost is None
            member.lost = member.lost or error
            if self.members.get(member.node) is member:
                del self.members[member.node]
            self._condition.notify_all()
        if first and not (member.dismissed or self._ending or self._closed.is_set()):
            logger.warning("%s is gone: %s", member, error)
        self.inbox.trouble(member)
        member.control.close(timeout_s=0)

    def _watch(self) -> None:
        """Send heartbeats, and give up workers that are silent for too long."""
        tick_s = min(self.liveness.interval_s, 1.0)
        before = time.monotonic()
        while not self._closed.wait(tick_s):
            late_s, before = time.monotonic() - before - tick_s, time.monotonic()
            for member in self.live():
                if late_s > self.liveness.timeout_s:  # this process was stopped, or starved of the interpreter's lock
                    member.control.excuse()
                silent_s = member.control.silent_s()
                if silent_s > self.liveness.limit_s:
                    self._lose(member, PeerClosedError(f"no sign of life for {silent_s:.1f} s {_WHY_SILENT}"))
                    continue
                try:
                    member.control.beat(Heartbeat())
                except TransportError as error:
                    self._lose(member, error)

    def give_up(self, member: Member, error: TorchSlicerError) -> None:
        """End the connection to a worker, which may register anew."""
        self._lose(member, error)

    def wait_released(self, members: Sequence[Member], *, timeout_s: float) -> bool:
        """Wait until *members* have let go of their run; say whether they have."""
        with self._condition:
            return self._condition.wait_for(
                lambda: all(member.busy is None or member.lost is not None for member in members), timeout_s
            )

    def close(self, *, shut_workers: bool = False) -> None:
        """Stop listening and end all connections; with *shut_workers*, tell workers to exit."""
        if shut_workers:
            self._ending = True
            for member in self.live():
                with contextlib.suppress(TransportError):
                    member.control.send(Shutdown(), timeout_s=1.0)
        self._closed.set()
        for listener in self._listeners:
            listener.close()
        with self._condition:
            members, threads = list(self.members.values()), list(self._threads)
            self._condition.notify_all()
        for member in members:
            member.control.close(timeout_s=1.0 if shut_workers else 0.0)
        self._door.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

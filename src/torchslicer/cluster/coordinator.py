"""The coordinator's side: which workers there are, what they say, and whether they are still alive."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchslicer.cluster.control import Control
from torchslicer.cluster.hub import TlsMaterial, check_reachable
from torchslicer.cluster.messages import (
    PROTOCOL,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Released,
    Shutdown,
    State,
    Welcome,
)
from torchslicer.errors import (
    DeadlineError,
    NonFiniteLossError,
    PeerClosedError,
    ProtocolError,
    StageError,
    TorchSlicerError,
    TransportError,
    WorkerFailureError,
)
from torchslicer.transport.base import Channel, Listener
from torchslicer.version import __version__

logger = logging.getLogger("torchslicer.coordinator")

HELLO_TIMEOUT_S = 5.0
_SAY_WHO_IS_MISSING_S = 5.0
_ROOT_CAUSE_S = 2.0


@dataclass(frozen=True)
class Liveness:
    """How quickly a silent worker is given up."""

    interval_s: float = 5.0
    timeout_s: float = 3.0

    @property
    def limit_s(self) -> float:
        """How long a worker may be silent."""
        return self.interval_s + self.timeout_s


@dataclass
class Member:
    """A worker that has registered."""

    hello: Hello
    control: Control
    last_seen: float = field(default_factory=time.monotonic)
    lost: TorchSlicerError | None = None
    dialled: str | None = None

    @property
    def node(self) -> str:
        """Its name."""
        return self.hello.node

    def __str__(self) -> str:
        return f"worker '{self.node}' ({self.control.peer})"


class Coordinator:
    """Takes workers in and passes on what they say.

    Args:
        run_id: The run that workers register for.
        liveness: How quickly a silent worker is given up.
        tag_filter: Workers must have all of these tags.
        tls: Encryption of the data connections that workers are checked on.
    """

    def __init__(
        self,
        run_id: str,
        *,
        liveness: Liveness | None = None,
        tag_filter: Sequence[str] = (),
        tls: TlsMaterial | None = None,
    ) -> None:
        self.run_id = run_id
        self.liveness = liveness or Liveness()
        self.tag_filter = tuple(tag_filter)
        self.tls = tls
        self.members: dict[str, Member] = {}
        self.refused: deque[str] = deque(maxlen=20)
        self._inbox: deque[tuple[Member, Any, list[torch.Tensor]]] = deque()
        self._condition = threading.Condition()
        self._closed = threading.Event()
        self._listener: Listener | None = None
        self._threads: list[threading.Thread] = [self._start(self._watch)]

    def _start(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=f"torchslicer{target.__name__}", daemon=True)
        thread.start()
        return thread

    # -- membership ------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Take in workers that connect to *listener*."""
        self._listener = listener
        self._threads.append(self._start(self._accept, listener))

    def _accept(self, listener: Listener) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(DeadlineError):
                try:
                    channel = listener.accept(timeout_s=1.0)
                except PeerClosedError:
                    return
                self._start(self._greet, channel)

    def _greet(self, channel: Channel) -> None:
        try:
            self.adopt(channel)
        except TorchSlicerError as error:
            self.refused.append(f"{channel.peer}: {error}")
            logger.warning("a connection from %s was not taken in: %s", channel.peer, error)
            channel.close()

    def adopt(self, channel: Channel) -> Member:
        """Take in the worker at the other end of *channel*.

        Raises:
            ProtocolError: It is no worker, of another version, or cannot be reached for data.
        """
        control = Control(channel)
        hello = control.receive(timeout_s=HELLO_TIMEOUT_S)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"{channel.peer} did not introduce itself as a worker")
        reason = self._reason_to_refuse(hello)
        if reason is not None:
            control.send(Refused(reason=reason))
            raise ProtocolError(f"worker '{hello.node}': {reason}")
        control.send(
            Welcome(
                run_id=self.run_id,
                heartbeat_interval_s=self.liveness.interval_s,
                heartbeat_timeout_s=self.liveness.timeout_s,
            )
        )
        member = Member(hello, control)
        with self._condition:
            self.members[hello.node] = member
            self._condition.notify_all()
        self._threads.append(self._start(self._read, member))
        logger.info("%s registered", member)
        return member

    def _reason_to_refuse(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL or hello.version != __version__:
            return f"it has torchslicer {hello.version}, the coordinator {__version__}; install the same on both"
        missing = [tag for tag in self.tag_filter if tag not in hello.tags]
        if missing:
            return f"it lacks the tag(s) {missing}; it has {list(hello.tags)}"
        known = self.members.get(hello.node)
        if known is not None and known.lost is None:
            return f"a worker of the name '{hello.node}' is registered already; start it with another --name"
        return self._unreachable(hello)

    def _unreachable(self, hello: Hello) -> str | None:
        try:
            check_reachable(hello.endpoints, hello.host, self.run_id, tls=self.tls)
        except TorchSlicerError as error:
            offered = ", ".join(endpoint.address for endpoint in hello.endpoints)
            return (
                f"it advertised {offered}, which the coordinator cannot reach: {error}; start it with --advertise HOST "
                "(or set WORKER_ADDRESS), a name or address that other machines can connect to"
            )
        return None

    def wait_for(self, count: int, *, timeout_s: float) -> list[Member]:
        """Return *count* live workers, in the order of their names, once so many have registered.

        Raises:
            WorkerFailureError: They did not come within *timeout_s*.
        """
        deadline = time.monotonic() + timeout_s
        next_word = time.monotonic() + _SAY_WHO_IS_MISSING_S
        with self._condition:
            while True:
                live = self.live()
                if len(live) >= count:
                    return live[:count]
                now = time.monotonic()
                if now >= deadline:
                    raise WorkerFailureError(self._missing(count, live, timeout_s))
                if now >= next_word:
                    logger.info("waiting for workers: %d of %d are here", len(live), count)
                    next_word = now + _SAY_WHO_IS_MISSING_S
                self._condition.wait(min(deadline, next_word) - now)

    def live(self) -> list[Member]:
        """Return the workers that are there, in the order of their names."""
        return [member for _, member in sorted(self.members.items()) if member.lost is None]

    def _missing(self, count: int, live: Sequence[Member], timeout_s: float) -> str:
        here = ", ".join(map(str, live)) or "none"
        where = f" at {self._listener.address}" if self._listener is not None else ""
        refused = "".join(f"\n  refused: {reason}" for reason in self.refused)
        return (
            f"{count} workers are needed, {len(live)} registered{where} within {timeout_s:.0f} s: {here}. Start the "
            f"others with: torchslicer worker --coordinator HOST:PORT{refused}"
        )

    # -- what workers say ------------------------------------------------------------------------------------

    def _read(self, member: Member) -> None:
        try:
            while not self._closed.is_set():
                try:
                    message = member.control.receive(timeout_s=1.0)
                except DeadlineError:
                    continue
                member.last_seen = time.monotonic()
                tensors: list[torch.Tensor] = []
                if isinstance(message, State):
                    tensors = member.control.receive_tensors(len(message.tensors), timeout_s=60.0)
                    member.last_seen = time.monotonic()
                if not isinstance(message, Heartbeat):
                    with self._condition:
                        self._inbox.append((member, message, tensors))
                        self._condition.notify_all()
        except TorchSlicerError as error:
            self._lose(member, error)

    def _lose(self, member: Member, error: TorchSlicerError) -> None:
        with self._condition:
            if member.lost is None:
                member.lost = error
                if not self._closed.is_set():
                    logger.warning("%s is gone: %s", member, error)
            self._condition.notify_all()
        member.control.close()

    def _watch(self) -> None:
        """Send heartbeats, and give up workers that are silent for too long."""
        while not self._closed.wait(min(self.liveness.interval_s, 1.0)):
            for member in self.live():
                silent_s = time.monotonic() - member.last_seen
                if silent_s > self.liveness.limit_s:
                    self._lose(member, PeerClosedError(f"no sign of life for {silent_s:.1f} s"))
                    continue
                try:
                    member.control.send(Heartbeat(), timeout_s=self.liveness.timeout_s)
                except TransportError as error:
                    self._lose(member, error)

    def collect(
        self, kind: type[Message], members: Sequence[Member], *, among: Sequence[Member], timeout_s: float, where: Any
    ) -> dict[str, tuple[Any, list[torch.Tensor]]]:
        """Return a message of *kind* for which *where* holds from each of *members*.

        Args:
            kind: The class of the messages.
            members: Who is to send one.
            among: The members of the run; whatever one of them fails with is raised.
            timeout_s: How long nothing at all may come.
            where: Says of a message whether it is a wanted one.

        Raises:
            WorkerFailureError: A member died, or went silent.
            StageError: A stage raised.
            DeadlineError: Nothing came.
        """
        wanted = {member.node for member in members}
        found: dict[str, tuple[Any, list[torch.Tensor]]] = {}
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while True:
                if self._sort_inbox(kind, wanted, found, where):
                    deadline = time.monotonic() + timeout_s
                if len(found) == len(wanted):
                    return found
                self._raise_failures(among)
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = ", ".join(str(m) for m in members if m.node not in found)
                    raise DeadlineError(f"no {kind.__name__} from {missing} within {timeout_s:.0f} s")
                self._condition.wait(left)

    def _sort_inbox(self, kind: type[Message], wanted: set[str], found: dict[str, Any], where: Any) -> bool:
        arrived, rest = False, deque[tuple[Member, Any, list[torch.Tensor]]]()
        for member, message, tensors in self._inbox:
            fits = isinstance(message, kind) and member.node in wanted and member.node not in found and where(message)
            if fits:
                found[member.node] = (message, tensors)
                arrived = True
            else:
                rest.append((member, message, tensors))
        self._inbox = rest
        return arrived

    def _raise_failures(self, among: Sequence[Member]) -> None:
        """Raise what ended the run; wait a moment for the cause where a member only tells of a lost neighbour."""
        failed = [(member, message) for member, message, _ in self._inbox if isinstance(message, Failed)]
        lost = [member for member in among if member.lost is not None]
        if not failed and not lost:
            return
        if not lost and all(message.lost_peer is not None for _, message in failed):
            started = time.monotonic()
            while time.monotonic() - started < _ROOT_CAUSE_S and not lost:
                self._condition.wait(0.05)
                lost = [member for member in among if member.lost is not None]
                failed = [(member, message) for member, message, _ in self._inbox if isinstance(message, Failed)]
                if any(message.lost_peer is None for _, message in failed):
                    break
        own = [(member, message) for member, message in failed if message.lost_peer is None]
        if own:
            raise _remote_error(*own[0])
        if lost:
            raise WorkerFailureError(f"{lost[0]} failed: {lost[0].lost}")
        raise _remote_error(*failed[0])

    def failure(self, among: Sequence[Member]) -> None:
        """Raise what ended the run, if anything has."""
        with self._condition:
            self._raise_failures(among)

    def wait_released(self, members: Sequence[Member], generation: int, *, timeout_s: float) -> None:
        """Wait until *members* have forgotten a run that was given up; those that do not are given up."""
        deadline = time.monotonic() + timeout_s
        waiting = {member.node: member for member in members}
        with self._condition:
            while waiting:
                for member, message, _ in self._inbox:
                    if isinstance(message, Released) and message.generation == generation:
                        waiting.pop(member.node, None)
                waiting = {node: member for node, member in waiting.items() if member.lost is None}
                left = deadline - time.monotonic()
                if not waiting or left <= 0:
                    break
                self._condition.wait(left)
        for member in waiting.values():
            self._lose(member, DeadlineError(f"did not give the run up within {timeout_s:.0f} s"))

    def forget_messages(self) -> None:
        """Throw away what members said of a run that is over."""
        with self._condition:
            self._inbox.clear()

    def close(self, *, shut_workers: bool = False) -> None:
        """Stop listening and end all connections; with *shut_workers*, tell workers to exit."""
        if shut_workers:
            for member in self.live():
                with contextlib.suppress(TransportError):
                    member.control.send(Shutdown(), timeout_s=5.0)
        self._closed.set()
        if self._listener is not None:
            self._listener.close()
        for member in self.members.values():
            member.control.close()
        for thread in self._threads:
            thread.join(timeout=5.0)


def _remote_error(member: Member, failed: Failed) -> TorchSlicerError:
    """Return the error that a worker told of, with the traceback that it had there."""
    if failed.error == "NonFiniteLossError":
        return NonFiniteLossError(failed.message)
    text = f"{member}: {failed.message}\n\nTraceback on the worker:\n{failed.traceback}"
    if failed.lost_peer is not None or failed.error in ("DeadlineError", "PeerLostError"):
        return WorkerFailureError(text)
    return StageError(text)

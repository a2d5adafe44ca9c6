"""A worker: it offers itself to a coordinator, holds the stages it is given, and serves run after run.

Three threads serve a connection. One reads: it ends the run in progress when the coordinator gives it up, and queues
everything else. One computes: it takes the queue, message by message. One sends heartbeats, with a word on what the
computing one is doing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchslicer.cluster.assignment import Assignment, RunAbortedError, failure_message
from torchslicer.cluster.control import Control
from torchslicer.cluster.current import CurrentRun
from torchslicer.cluster.door import KNOWN, STRANGER
from torchslicer.cluster.heap import keep_freed_memory
from torchslicer.cluster.hub import PLAIN, Attachments
from torchslicer.cluster.messages import (
    PROTOCOL,
    Abort,
    Assign,
    Heartbeat,
    Hello,
    Refused,
    Release,
    Released,
    Scale,
    Shutdown,
    Welcome,
)
from torchslicer.cluster.security import Protection
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.errors import (
    DeadlineError,
    PeerClosedError,
    ProtocolError,
    RunError,
    TorchSlicerError,
    TransportError,
    WorkerFailureError,
)
from torchslicer.transport.address import host_id, process_id
from torchslicer.transport.base import Channel
from torchslicer.version import __version__

logger = logging.getLogger("torchslicer.worker")

WELCOME_TIMEOUT_S = 60.0  # the coordinator dials back first, and waits for a namesake to be gone
CPU = torch.device("cpu")


@dataclass(frozen=True)
class WorkerSettings:
    """Who a worker is.

    Attributes:
        node: Its name; stages are given out in the order of names.
        device: Where its stages compute.
        threads: Threads of torch; 0 lets the coordinator share the host's cores among its workers.
        tags: What a coordinator may ask for.
        trusted: Packages whose classes and functions may be used, beside torch's and the library's own.
        builders: Functions that may be called to build models.
    """

    node: str
    device: torch.device = CPU
    threads: int = 0
    tags: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    builders: tuple[str, ...] = ()


@dataclass
class Connection:
    """One connection to a coordinator, and what is read from it."""

    control: Control
    welcome: Welcome
    commands: queue.SimpleQueue[tuple[Any, list[torch.Tensor], Assignment | None]] = field(
        default_factory=queue.SimpleQueue
    )
    ended: threading.Event = field(default_factory=threading.Event)
    assignment: Assignment | None = None  # the newest; set by the thread that reads

    def fail_run(self, error: BaseException) -> None:
        """End the run in progress, if there is one."""
        if self.assignment is not None:
            self.assignment.fail(error)

    @property
    def doing(self) -> str:
        """What the computing thread is at, in words."""
        assignment = self.assignment
        return "is idle" if assignment is None else assignment.doing

    def end(self) -> None:
        """Let the computing thread come to an end."""
        self.commands.put((None, [], None))

    def check_silence(self) -> None:
        """Raise if the coordinator has been silent for too long."""
        silent_s = self.control.silent_s()
        if silent_s > self.welcome.heartbeat_timeout_s + self.welcome.heartbeat_interval_s:
            raise PeerClosedError(f"no sign of life from the coordinator for {silent_s:.0f} s")


class Worker:
    """Serves one coordinator after the other.

    Args:
        settings: Who it is.
        hub: Where it takes data connections.
        protection: Of the connections that it makes.
    """

    def __init__(self, settings: WorkerSettings, hub: Attachments, *, protection: Protection = PLAIN) -> None:
        self.settings = settings
        self.hub = hub
        self.protection = protection
        self.stopping = threading.Event()
        self._instance = secrets.token_hex(8)
        self._connection: Connection | None = None
        _import_what_optimizers_import()
        keep_freed_memory()

    def serve(self, channel: Channel) -> None:
        """Introduce this worker on *channel* and do what comes, until the connection ends or a shutdown is asked for.

        Raises:
            ProtocolError: The coordinator refused this worker.
            TransportError: The coordinator did not answer.
        """
        self.attend(self.introduce(channel))

    def introduce(self, channel: Channel) -> Connection:
        """Say who this worker is, and wait to be taken in; if it is not, the channel is closed.

        Raises:
            ProtocolError: The coordinator refused this worker.
            TransportError: The coordinator did not answer.
        """
        channel.limits = STRANGER
        control = Control(channel)
        try:
            welcome = self._welcome(control)
        except BaseException:
            control.close()
            raise
        channel.limits = KNOWN
        return Connection(control, welcome)

    def _welcome(self, control: Control) -> Welcome:
        control.send(self._hello(), timeout_s=WELCOME_TIMEOUT_S)
        deadline = time.monotonic() + WELCOME_TIMEOUT_S
        while True:
            try:
                answer = control.receive(timeout_s=0.5)
            except DeadlineError:
                if self.stopping.is_set() or time.monotonic() > deadline:
                    raise
                continue
            if isinstance(answer, Refused):
                raise ProtocolError(f"the coordinator at {control.peer} refused this worker: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"the coordinator at {control.peer} answered with {type(answer).__name__}")
            return answer

    def attend(self, connection: Connection) -> None:
        """Do what comes on a connection, until it ends or a shutdown is asked for."""
        control, run_id = connection.control, connection.welcome.run_id
        logger.info("registered with the coordinator at %s for run %s", control.peer, run_id)
        self._connection = connection
        control.excuse()
        with _threads(connection, self._read, self._beat):
            if not self.stopping.is_set():
                self._work(connection)

    def stop(self) -> None:
        """End at the next opportunity; a run in progress fails. A signal handler may call this.

        In a thread of its own: what a handler interrupts may hold the very locks that are needed here.
        """
        threading.Thread(target=self._stop, name="torchslicer-stop", daemon=True).start()

    def _stop(self) -> None:
        self.stopping.set()
        connection = self._connection
        if connection is None:
            return
        assignment = connection.assignment
        if assignment is not None and assignment.mailbox.failure is None:
            error = WorkerFailureError("the worker was told to stop (SIGTERM, SIGINT or its program)")
            assignment.fail(error)
            self._report(connection, assignment, error)  # at once: what it computes may take a while yet
        connection.end()

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            version=__version__,
            torch_version=torch.__version__,
            node=self.settings.node,
            instance=self._instance,
            process=process_id(),
            host=host_id(),
            device=str(self.settings.device),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            threads=self.settings.threads,
            tags=list(self.settings.tags),
            endpoints=list(self.hub.endpoints),
            trusted=list(self.settings.trusted),
            builders=list(self.settings.builders),
        )

    def _allowed(self) -> Allowed:
        return Allowed(self.settings.trusted, allow_builders=self.settings.builders)

    # -- threads that read and beat --------------------------------------------------------------------------

    def _read(self, connection: Connection) -> None:
        try:
            connection.control.beat(Heartbeat(doing="is idle"))  # a driver waits for it
            while not connection.ended.is_set():
                try:
                    message = connection.control.receive(timeout_s=1.0)
                except DeadlineError:
                    connection.check_silence()
                    continue
                self._dispatch(connection, message)
        except TorchSlicerError as error:
            self._gone(connection, error)
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would leave the worker waiting
            self._gone(connection, ProtocolError(f"what it sent could not be read ({type(error).__name__}: {error})"))
        finally:
            connection.end()

    def _gone(self, connection: Connection, error: TorchSlicerError) -> None:
        if not connection.ended.is_set():
            logger.info("the connection to the coordinator ended: %s", error)
        connection.fail_run(RunAbortedError(f"the coordinator is gone: {error}"))

    def _dispatch(self, connection: Connection, message: Any) -> None:
        if isinstance(message, Heartbeat):
            return
        tensors: list[torch.Tensor] | None = []
        assignment = connection.assignment
        if isinstance(message, Assign):
            tensors = connection.control.receive_tensors(len(message.tensors), check=connection.check_silence)
            if tensors is None:
                return  # given up half-way
            assignment = connection.assignment = Assignment(message, self.hub, self.protection)
        elif isinstance(message, Abort) and assignment is not None and assignment.generation == message.generation:
            assignment.fail(RunAbortedError(message.reason))
        elif isinstance(message, Scale):
            if assignment is not None and assignment.generation == message.generation:
                assignment.put_scale(message)
            return
        connection.commands.put((message, tensors or [], assignment))

    def _beat(self, connection: Connection) -> None:
        with contextlib.suppress(TransportError):  # the reading thread notices, too
            while not connection.ended.wait(connection.welcome.heartbeat_interval_s):
                connection.control.beat(Heartbeat(doing=connection.doing[:1000]))

    # -- the thread that computes ----------------------------------------------------------------------------

    def _work(self, connection: Connection) -> None:
        run = CurrentRun()
        try:
            while True:
                message, tensors, assignment = connection.commands.get()
                if message is None or isinstance(message, Shutdown):
                    if isinstance(message, Shutdown):
                        self.stopping.set()
                    return
                if isinstance(message, (Release, Abort)):
                    if assignment is None or assignment.generation == message.generation:  # else of an older run
                        run.close()
                        connection.assignment = None  # the next comes only once this one is known to be released
                    connection.control.send(Released(generation=message.generation))
                    del message, tensors, assignment  # what a run failed with hangs on it, and its weights on that
                    gc.collect()  # weights that hang in a cycle are not to stay until the next run needs the memory
                else:
                    self._obey(connection, run, message, tensors, assignment)
        except TransportError as error:
            logger.info("the connection to the coordinator ended: %s", error)
        finally:
            run.close()

    def _obey(
        self,
        connection: Connection,
        run: CurrentRun,
        message: Any,
        tensors: list[torch.Tensor],
        assignment: Assignment | None,
    ) -> None:
        try:
            if isinstance(message, Assign):
                run.close()
                run.assignment = assignment
                run.begin(tensors, device=self.settings.device, allowed=self._allowed(), tell=connection.control.send)
            elif run.session is not None and message.generation == run.session.generation:
                run.handle(message)
            # anything else is left over from a run that was given up
        except BaseException as error:  # whatever goes wrong is the coordinator's to tell
            self._end_failed(connection, run, error)
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # it may be Ctrl-C; in another thread only the code of a stage raises it

    def _end_failed(self, connection: Connection, run: CurrentRun, error: BaseException) -> None:
        """Tell what went wrong, unless the coordinator has ended the run itself, and forget the run.

        Telling comes first: other workers notice that links close, and what they say of it is only a consequence.
        """
        assignment = run.assignment
        if assignment is not None:
            ended = assignment.mailbox.failure
            if isinstance(ended, RunAbortedError) and isinstance(error, RunError):
                logger.info("the run was given up: %s", str(ended).split("\n", 1)[0])
            else:
                self._report(connection, assignment, error)
        run.close()

    def _report(self, connection: Connection, assignment: Assignment, error: BaseException) -> None:
        if assignment.told:
            return
        assignment.told = True
        failed = failure_message(assignment, error)
        log, how = (logger.error, "failed here") if failed.lost_peer is None else (logger.info, "ended")
        log("the run %s: %s", how, failed.message)
        with contextlib.suppress(TransportError):
            connection.control.send(failed)


def _import_what_optimizers_import() -> None:
    """Make an optimizer: the first one of a process imports much of torch, which takes seconds. Not in a run, then."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@contextlib.contextmanager
def _threads(connection: Connection, *targets: Any) -> Iterator[None]:
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

"""Run a worker: connect to a coordinator (or wait for a driver), serve run after run, stop cleanly."""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

import torch

from torchslicer.cluster.door import STRANGER, Complaints, Door
from torchslicer.cluster.hub import Hub, check_peer
from torchslicer.cluster.security import COORDINATOR, JoinString, Protection, parse_address, read_join_file
from torchslicer.cluster.security.addresses import is_loopback
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.worker import Connection, Worker, WorkerSettings
from torchslicer.config import RunConfig
from torchslicer.config.environment import join_string
from torchslicer.errors import (
    ConfigError,
    DeadlineError,
    PeerClosedError,
    SecurityError,
    TorchSlicerError,
    TransportError,
)
from torchslicer.executors.protect import Tls, given_protection
from torchslicer.transport.base import Channel, ChannelOptions
from torchslicer.transport.tcp import TcpListener, connect

logger = logging.getLogger("torchslicer.worker")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_SAY_WAITING_S = 10.0
_CONNECT_TIMEOUT_S = 5.0


def run_worker(
    coordinator: str | None = None,
    *,
    listen: str | None = None,
    bind: str | None = None,
    advertise: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    tags: Sequence[str] | None = None,
    name: str | None = None,
    trust: Sequence[str] = (),
    join: str | None = None,
    join_file: str | os.PathLike[str] | None = None,
    tls: Tls | None = None,
    insecure: bool = False,
    once: bool = False,
    stop: threading.Event | None = None,
    exit_after_s: float | None = None,
    run_config: RunConfig | None = None,
) -> None:
    """Serve as a worker until told to stop (SIGTERM, SIGINT, the coordinator's word, or *stop*).

    Args:
        coordinator: ``HOST:PORT`` of the coordinator; it may start later than the worker.
        listen: Wait for a driver here instead (P2P).
        bind: Where to take data connections, ``HOST:PORT``; by default a free port of loopback, or of all interfaces
            when the coordinator is elsewhere.
        advertise: Host that others are told to connect to.
        device: ``"auto"``, ``"cpu"``, ``"cuda:0"``.
        threads: Threads of torch; by default the host's cores are shared among its workers.
        tags: What a coordinator may ask for.
        name: Name of the worker; stages are given out in the order of names.
        trust: Packages whose classes and functions may be used in models.
        join: The join string that the coordinator has printed; by default that in ``TORCHSLICER_JOIN``.
        join_file: A file with the join string, which only its owner can read.
        tls: Certificates: the files ``ca``, ``cert``, ``key``, and the ``names`` that peers may have; by default
            those of ``run_config.network.tls``.
        insecure: Allow plain text beyond loopback; takes effect only with ``TS_INSECURE=1`` in the environment.
        once: End when the first coordinator is gone.
        stop: Set it to end the worker from another thread.
        exit_after_s: End the process if, told to stop, a stage's code has not returned after that time.
        run_config: Where settings come from that are not given.

    Raises:
        ConfigError: Neither *coordinator* nor *listen* is known, or a device is not there.
        SecurityError: What was asked is not safe, or the other side is not who it should be.
        ProtocolError: The coordinator refused this worker.
        ShippingError: A package of *trust* must not be trusted.
    """
    config = run_config or RunConfig.from_env()
    network = config.network
    coordinator = coordinator or (None if listen else network.coordinator_address)
    if (coordinator is None) == (listen is None):
        raise ConfigError(
            "run_worker: give coordinator='HOST:PORT', or listen='HOST:PORT' for P2P (or set COORDINATOR_ADDRESS)"
        )
    chosen = _device(device or network.device)
    Allowed(trust)  # says now what must not be trusted, not in the first run
    protection = given_protection(config, tls=tls, insecure=insecure)
    node = _node(name, protection)
    ending = _Ending(stop, exit_after_s)
    with ending:
        if coordinator is not None and protection.material is None:
            joining = _join_string(join, join_file)
            if joining is not None:
                node = node if name is not None else _identity_label(node)
                protection = _join(coordinator, joining, node, ending)
        elif join is not None or join_file is not None:
            raise ConfigError("--join: only for --coordinator, and not together with certificates of your own")
        if ending.event.is_set():
            return
        if coordinator is not None:
            _warn(protection.check_connect(coordinator).warnings)
        hub = Hub(
            bind or _default_bind(coordinator or listen or ""),
            advertise=advertise or network.worker_address,
            toward=coordinator,
            protection=protection,
        )
        settings = WorkerSettings(
            node=node,
            device=chosen,
            threads=threads or 0,
            tags=tuple(network.worker_tags if tags is None else tags),
            trusted=tuple(trust),
        )
        worker = ending.worker = Worker(settings, hub, protection=protection)
        if ending.event.is_set():
            worker.stop()
        try:
            if coordinator is not None:
                _serve_coordinator(worker, coordinator, protection, once=once)
            elif listen is not None:
                _serve_drivers(worker, listen, protection, once=once)
        finally:
            hub.close()


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        logger.warning("%s", warning)


def _node(name: str | None, protection: Protection) -> str:
    """Return this worker's name: with certificates of ours the one in its certificate, unless a driver started it."""
    if protection.node and protection.node != COORDINATOR and name not in (None, protection.node):
        raise SecurityError(
            f"--name {name}: the certificate is for {protection.node!r}; leave --name out, or give this worker its own"
        )
    return name or protection.node or f"{socket.gethostname()}-{os.getpid()}"


def _identity_label(node: str) -> str:
    """Make of a host's name one that can stand in a certificate."""
    return re.sub(r"[^a-z0-9-]+", "-", node.lower())[-63:].strip("-") or "worker"


def _default_bind(other: str) -> str:
    """Return loopback if the *other* side is there, else all interfaces; the start-up rule looks at it again."""
    where = parse_address(other)
    if where.is_unix or is_loopback(where):
        return "[::1]:0" if where.host == "::1" else "127.0.0.1:0"
    return "[::]:0" if ":" in where.host else "0.0.0.0:0"


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {name!r} is not there; this machine has no CUDA device, use 'cpu'")
    return device


# -- joining -------------------------------------------------------------------------------------------------


def _join_string(text: str | None, path: str | os.PathLike[str] | None) -> JoinString | None:
    if text is not None and path is not None:
        raise ConfigError("--join and --join-file: give one of them")
    if path is not None:
        return read_join_file(path, now=time.time())
    if text is None:
        secret = join_string()
        text = None if secret is None else secret.reveal()
    return None if text is None else JoinString.parse(text, now=time.time())


def _join(coordinator: str, joining: JoinString, node: str, ending: _Ending) -> Protection:
    """Join the run, as soon as there is a coordinator."""
    from torchslicer.cluster.security.exchange import join_run  # noqa: PLC0415 - needs cryptography, an extra
    from torchslicer.cluster.security.messages import JoinRefusedError  # noqa: PLC0415

    wait = _Waiting(ending.event, f"waiting for a coordinator at {coordinator} to join")
    while not ending.event.is_set():
        try:
            material = join_run(coordinator, joining, node)
        except JoinRefusedError as error:
            if error.code != "rate":
                raise
            wait.a_little(error)
        except OSError as error:
            wait.a_little(error)
        else:
            logger.info("joined run %s as %s", joining.run_id, node)
            return Protection(material, joining.run_id, node)
    return Protection()


# -- serving -------------------------------------------------------------------------------------------------


def _serve_coordinator(worker: Worker, address: str, protection: Protection, *, once: bool) -> None:
    """Connect, serve, and connect again when the coordinator is gone."""
    text = f"waiting for a coordinator at {address}"
    wait = _Waiting(worker.stopping, text)
    if parse_address(address).is_unix:  # guarded by the file system
        protection = Protection()
    name = protection.server_name(COORDINATOR, address)
    while not worker.stopping.is_set():
        try:
            channel = connect(address, timeout_s=_CONNECT_TIMEOUT_S, tls=protection.client, server_hostname=name)
            worker.serve(channel)
        except TransportError as error:
            _check_trust(error, address, protection)
            wait.a_little(error)
            continue
        if once:
            return
        wait = _Waiting(worker.stopping, text)


def _check_trust(error: TransportError, address: str, protection: Protection) -> None:
    """Give up where waiting cannot help: one side does not accept the other's certificate.

    Raises:
        SecurityError: So it is.
    """
    cause = error.__cause__
    alert = isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or "")
    if protection.material is not None and (isinstance(cause, ssl.SSLCertVerificationError) or alert):
        raise SecurityError(
            f"the coordinator at {address} and this worker do not accept each other's certificates: {error}; if it was "
            "started anew, take the join string that it prints now"
        ) from error


def _serve_drivers(worker: Worker, listen: str, protection: Protection, *, once: bool) -> None:
    _warn(protection.check_bind(listen, "peer").warnings)
    listener = TcpListener(listen, tls=protection.server, options=ChannelOptions(limits=STRANGER))
    logger.info("listening for a driver on %s", listener.address)
    drivers = _Drivers(worker, listener, protection)
    try:
        while not worker.stopping.is_set():
            connection = drivers.next(timeout_s=0.5)
            if connection is None:
                continue
            worker.attend(connection)
            if once:
                return
            drivers.idle.set()
    finally:
        drivers.close()


class _Drivers:
    """Finds out in threads who connects, so that no stranger keeps a driver waiting; one driver at a time."""

    def __init__(self, worker: Worker, listener: TcpListener, protection: Protection) -> None:
        self.idle = threading.Event()
        self.idle.set()
        self._worker, self._listener, self._protection = worker, listener, protection
        self._door = Door(8)
        self._complaints = Complaints(logger)
        self._found: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._accept, name="torchslicer-drivers", daemon=True)
        self._closed = threading.Event()
        self._thread.start()

    def next(self, *, timeout_s: float) -> Connection | None:
        """Return the connection of a driver that has taken this worker in, None if there is none yet."""
        try:
            found = self._found.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self.idle.clear()
        return found

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self.idle.wait(0.5):
                continue
            try:
                self._door.greet(self._listener.accept(timeout_s=0.5), self._greet)
            except DeadlineError:
                continue
            except PeerClosedError:
                return

    def _greet(self, channel: Channel) -> None:
        try:
            if self._protection.material is not None:
                channel.start(timeout_s=_CONNECT_TIMEOUT_S)  # type: ignore[attr-defined]
            check_peer(channel, self._protection, COORDINATOR)
            self._found.put(self._worker.introduce(channel))
        except TorchSlicerError as error:
            self._complaints.warn("a connection from %s was not a driver's: %s", channel.peer, error)
            channel.close(timeout_s=0)

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._listener.close()
        self._thread.join(timeout=5.0)
        self._door.close()
        while not self._found.empty():
            self._found.get().control.close()


class _Waiting:
    """Waits longer each time, and says so once in a while."""

    def __init__(self, stopping: threading.Event, text: str) -> None:
        self._stopping, self._text = stopping, text
        self._pause_s = _FIRST_RETRY_S
        self._next_word = time.monotonic() + _FIRST_RETRY_S

    def a_little(self, error: Exception) -> None:
        if time.monotonic() >= self._next_word:
            logger.info("%s (%s)", self._text, error)
            self._next_word = time.monotonic() + _SAY_WAITING_S
        self._stopping.wait(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_RETRY_S)


class _Ending:
    """Lets SIGTERM and SIGINT (in the main thread) and an event stop the worker, also before there is one."""

    def __init__(self, stop: threading.Event | None, exit_after_s: float | None) -> None:
        self.event = threading.Event()
        self._exit_after_s = exit_after_s
        self.worker: Worker | None = None
        self._stop = stop
        self._before: dict[int, Callable[..., object] | int | None] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, lambda *_: self._end())
        if self._stop is not None:
            self._thread = threading.Thread(target=self._follow, name="torchslicer-stop", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        while not self._done.is_set():
            if self._stop is not None and self._stop.wait(0.1):
                self._end()
                return

    def _end(self) -> None:
        self.event.set()
        if self.worker is not None:
            self.worker.stop()
        if self._exit_after_s is not None:
            threading.Thread(target=self._force, name="torchslicer-force", daemon=True).start()

    def _force(self) -> None:
        """End the process when the code of a stage does not return; there is no other way to stop it."""
        if not self._done.wait(self._exit_after_s):
            logger.error("a stage did not return within %.0f s; the process ends", self._exit_after_s)
            os._exit(143)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

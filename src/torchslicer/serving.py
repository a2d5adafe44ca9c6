"""Run a worker: connect to a coordinator (or wait for a driver), serve run after run, stop cleanly."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch

from torchslicer.cluster.hub import Hub, TlsMaterial
from torchslicer.cluster.worker import Worker, WorkerSettings
from torchslicer.config import RunConfig
from torchslicer.errors import ConfigError, DeadlineError, ProtocolError, TransportError
from torchslicer.transport.address import split_address
from torchslicer.transport.tcp import TcpListener, connect

logger = logging.getLogger("torchslicer.worker")

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_SAY_WAITING_S = 10.0


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
    tls: TlsMaterial | None = None,
    once: bool = False,
    stop: threading.Event | None = None,
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
        tls: Encryption.
        once: End when the first coordinator is gone.
        stop: Set it to end the worker from another thread.
        run_config: Where settings come from that are not given.

    Raises:
        ConfigError: Neither *coordinator* nor *listen* is known, or a device is not there.
        ProtocolError: The coordinator refused this worker.
    """
    network = (run_config or RunConfig.from_env()).network
    coordinator = coordinator or (None if listen else network.coordinator_address)
    if (coordinator is None) == (listen is None):
        raise ConfigError(
            "run_worker: give coordinator='HOST:PORT', or listen='HOST:PORT' for P2P (or set COORDINATOR_ADDRESS)"
        )
    settings = WorkerSettings(
        node=name or f"{socket.gethostname()}-{os.getpid()}",
        device=_device(device or network.device),
        threads=threads or 0,
        tags=tuple(network.worker_tags if tags is None else tags),
        trusted=tuple(trust),
    )
    hub = Hub(
        bind or _default_bind(coordinator or listen or ""), advertise=advertise or network.worker_address, tls=tls
    )
    worker = Worker(settings, hub, tls=tls)
    try:
        with _signals(worker, stop):
            if coordinator is not None:
                _serve_coordinator(worker, coordinator, tls, once=once)
            elif listen is not None:
                _serve_drivers(worker, listen, tls, once=once)
    finally:
        hub.close()


def _default_bind(other: str) -> str:
    host, _ = split_address(other)
    return "127.0.0.1:0" if host in ("localhost", "127.0.0.1", "::1") else "0.0.0.0:0"


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {name!r} is not there; this machine has no CUDA device, use 'cpu'")
    return device


def _serve_coordinator(worker: Worker, address: str, tls: TlsMaterial | None, *, once: bool) -> None:
    """Connect, serve, and connect again when the coordinator is gone."""
    wait = _Waiting(worker.stopping, f"waiting for a coordinator at {address}")
    name = split_address(address)[0]
    while not worker.stopping.is_set():
        try:
            channel = connect(
                address, timeout_s=5.0, tls=None if tls is None else tls.client, server_hostname=tls and name
            )
            worker.serve(channel)
        except ProtocolError:
            raise
        except TransportError as error:
            wait.a_little(error)
            continue
        if once:
            return
        wait = _Waiting(worker.stopping, f"waiting for a coordinator at {address}")


def _serve_drivers(worker: Worker, listen: str, tls: TlsMaterial | None, *, once: bool) -> None:
    listener = TcpListener(listen, tls=None if tls is None else tls.server)
    logger.info("listening for a driver on %s", listener.address)
    try:
        while not worker.stopping.is_set():
            try:
                channel = listener.accept(timeout_s=0.5)
            except DeadlineError:
                continue
            try:
                worker.serve(channel)
            except (ProtocolError, TransportError) as error:
                logger.warning("a connection from %s was not a driver's: %s", channel.peer, error)
                channel.close()
                continue
            if once:
                return
    finally:
        listener.close()


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


class _signals:  # noqa: N801 - used as a context, like a function
    """Lets SIGTERM and SIGINT (in the main thread) and an event stop the worker."""

    def __init__(self, worker: Worker, stop: threading.Event | None) -> None:
        self._worker, self._stop = worker, stop
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
        self._worker.stop()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

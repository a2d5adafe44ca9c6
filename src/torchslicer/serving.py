"""Run a worker: connect to a coordinator (or wait for a driver), serve run after run, stop cleanly."""

from __future__ import annotations

import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchslicer.cluster.door import STRANGER, Complaints, Door
from torchslicer.cluster.ending import Ending, Waiting
from torchslicer.cluster.hub import Hub, check_peer
from torchslicer.cluster.ports import ANY, PortPair, port_pairs
from torchslicer.cluster.security import COORDINATOR, JoinString, Protection, parse_address, read_join_file
from torchslicer.cluster.security.addresses import is_loopback
from torchslicer.cluster.security.tls import speaks_tls
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.worker import Connection, Worker, WorkerSettings
from torchslicer.config import RunConfig
from torchslicer.config.environment import join_string
from torchslicer.errors import (
    ConfigError,
    DeadlineError,
    FrameError,
    PeerClosedError,
    SecurityError,
    TorchSlicerError,
    TransportError,
)
from torchslicer.executors.described import worker_arguments_checked
from torchslicer.executors.protect import Tls, check_trust, given_protection
from torchslicer.transport.address import split_address
from torchslicer.transport.base import Channel, ChannelOptions
from torchslicer.transport.tcp import TcpListener, connect

logger = logging.getLogger("torchslicer.worker")

_CONNECT_TIMEOUT_S = 5.0


@worker_arguments_checked
def run_worker(
    coordinator: str | None = None,
    *,
    listen: str | None = None,
    bind: str | None = None,
    data_port: int | str | None = None,
    advertise: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    tags: Sequence[str] | None = None,
    name: str | None = None,
    trust: Sequence[str] = (),
    allow_builder: Sequence[str] = (),
    join: str | None = None,
    join_file: str | os.PathLike[str] | None = None,
    tls: Tls | None = None,
    insecure: bool = False,
    once: bool | None = None,
    stop: threading.Event | None = None,
    exit_after_s: float | None = None,
    socket_folder: str | os.PathLike[str] | None = None,
    run_config: RunConfig | None = None,
) -> None:
    """Serve as a worker until told to stop (SIGTERM, SIGINT, the coordinator's word, or *stop*).

    Args:
        coordinator: ``HOST:PORT`` of the coordinator; it may start later than the worker.
        listen: Wait for a driver here instead (P2P).
        bind: Where to take data connections, ``HOST:PORT``; by default a free port of loopback, or of all interfaces
            when the coordinator is elsewhere.
        data_port: Port for data connections by TCP, gRPC taking the next one; or a range ``"FIRST-LAST"``, of which two
            free ones are taken. By default that of ``run_config.network.data_port``, else free ones.
        advertise: Host that others are told to connect to.
        device: ``"auto"``, ``"cpu"``, ``"cuda:0"``.
        threads: Threads of torch; by default the host's cores are shared among its workers.
        tags: What a coordinator may ask for.
        name: Name of the worker; stages are given out in the order of names.
        trust: Packages whose classes and functions may be used in models.
        allow_builder: Functions that may be called to build models, for drivers that call ``ts.slice("pkg.mod:make")``:
            ``"pkg.mod:make"``, a pattern such as ``"pkg.mod:make_*"``, or a package or module.
        join: The join string that the coordinator has printed; by default that in ``TORCHSLICER_JOIN``.
        join_file: A file with the join string, which only its owner can read.
        tls: Certificates: the files ``ca``, ``cert``, ``key``, and the ``names`` that peers may have; by default
            those of ``run_config.network.tls``.
        insecure: Allow plain text beyond loopback; takes effect only with ``TS_INSECURE=1`` in the environment.
        once: End when the first coordinator is gone; by default if ``run_config.network.keep_alive`` is false.
        stop: Set it to end the worker from another thread.
        exit_after_s: End the process if, told to stop, a stage's code has not returned after that time.
        socket_folder: Where the UNIX socket for processes of this host is made; by default where temporary files go.
        run_config: Where settings come from that are not given; by default `RunConfig.load()`. With the discovery
            backend ``static`` and no address given, the worker listens at ``network.worker_port``.

    Raises:
        ConfigError: Neither *coordinator* nor *listen* is known, a device is not there, or an argument is of another
            kind.
        TransportError: A port is in use.
        SecurityError: What was asked is not safe, or the other side is not who it should be.
        ProtocolError: The coordinator refused this worker.
        ShippingError: A package of *trust* or *allow_builder* must not be trusted.
    """
    config = run_config or RunConfig.load()
    network = config.network
    protection = given_protection(config, tls=tls, insecure=insecure)
    coordinator, listen = _counterpart(coordinator, listen, config, protection)
    ports = _data_ports(data_port, config)
    once = not network.keep_alive if once is None else once
    chosen = _device(device or network.device)
    Allowed(trust, allow_builders=allow_builder)  # says now what must not be trusted, not in the first run
    node = _node(name, protection)
    ending = Ending(stop, exit_after_s)
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
        if listen is not None:
            protection.check_bind(listen, "peer")  # before the data ports, whose ways out are not a peer's
        hub = _open_hub(
            bind or _default_bind(coordinator or listen or ""),
            ports,
            advertise=advertise or network.worker_address,
            toward=coordinator,
            protection=protection,
            folder=None if socket_folder is None else Path(socket_folder),
        )
        tags = network.worker_tags if tags is None else tags
        settings = WorkerSettings(node, chosen, threads or 0, tuple(tags), tuple(trust), tuple(allow_builder))
        _serve(settings, hub, ending, coordinator=coordinator, listen=listen, protection=protection, once=once)


def _serve(
    settings: WorkerSettings,
    hub: Hub,
    ending: Ending,
    *,
    coordinator: str | None,
    listen: str | None,
    protection: Protection,
    once: bool,
) -> None:
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


def _counterpart(
    coordinator: str | None, listen: str | None, config: RunConfig, protection: Protection
) -> tuple[str | None, str | None]:
    """Return where the coordinator is, or else where to listen for a driver."""
    if coordinator is None and listen is None:
        network = config.network
        if config.discovery.backend == "static":
            host = "0.0.0.0" if protection.allows_others else "127.0.0.1"  # noqa: S104 - the start-up rule allows it
            return None, f"{host}:{network.worker_port}"
        coordinator = network.coordinator_address
    if (coordinator is None) == (listen is None):
        raise ConfigError(
            "run_worker: give coordinator='HOST:PORT', or listen='HOST:PORT' for P2P (or set COORDINATOR_ADDRESS, or "
            "discovery.backend: static in a configuration)"
        )
    return coordinator, listen


def _data_ports(setting: int | str | None, config: RunConfig) -> tuple[PortPair, ...]:
    setting = config.network.data_port if setting is None else setting
    return ANY if setting is None else port_pairs(setting, offset=config.transport.tensor_port_offset)


def _open_hub(bind: str, ports: tuple[PortPair, ...], **options: Any) -> Hub:
    """Open the hub at the first pair of *ports* that is free.

    Raises:
        ConfigError: *bind* gives another port.
        TransportError: None is free.
    """
    if ports == ANY:
        return Hub(bind, **options)
    where = parse_address(bind)
    if where.port:
        raise ConfigError(f"--bind {bind} and --data-port both give a port; leave that of --bind out ({where.host}:0)")
    problems = []
    for tcp, grpc in ports:
        try:
            return Hub(str(replace(where, port=tcp)), grpc_port=grpc, **options)
        except TransportError as error:
            problems.append(f"  {tcp} (TCP) and {grpc} (gRPC): {error}")
    raise TransportError(
        "no data ports are free; every worker of a host needs two of its own: give others with --data-port, such as a "
        "range with room for all (50061-50068)\n" + "\n".join(problems)
    )


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
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected 'auto', 'cpu' or 'cuda:0', got {name!r}") from error
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


def _join(coordinator: str, joining: JoinString, node: str, ending: Ending) -> Protection:
    """Join the run, as soon as there is a coordinator."""
    from torchslicer.cluster.security.exchange import join_run  # noqa: PLC0415 - needs cryptography, an extra
    from torchslicer.cluster.security.messages import JoinRefusedError  # noqa: PLC0415

    wait = Waiting(ending.event, f"waiting for a coordinator at {coordinator} to join")
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
    wait = Waiting(worker.stopping, text)
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
        wait = Waiting(worker.stopping, text)


def _check_trust(error: TransportError, address: str, protection: Protection) -> None:
    """Give up where waiting cannot help: one side does not accept the other's certificate, or has none.

    Raises:
        SecurityError: So it is.
    """
    cut_off = protection.material is None and isinstance(error, (FrameError, PeerClosedError))
    if cut_off and not address.startswith("unix:") and speaks_tls(*split_address(address)):
        raise SecurityError(
            f"the coordinator at {address} takes only TLS connections, and this worker has no certificate. Start it "
            f"with the line that the coordinator printed: torchslicer worker --coordinator {address} --join STRING (or "
            "--join-file, TORCHSLICER_JOIN), or with certificates: --tls-ca, --tls-cert, --tls-key"
        ) from error
    hint = "; if it was started anew, take the join string that it prints now"
    check_trust(error, f"the coordinator at {address} and this worker", protection, hint=hint)


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
        self._door = Door()
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

"""Mutual TLS and joining over real sockets on loopback, with certificates of ours and of trustme."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import trustme
from typing_extensions import Self

from torchslicer.cluster.security import (
    Authority,
    Identity,
    JoinServer,
    JoinString,
    Material,
    SecretBytes,
    check_pinned,
    client_context,
    grpc_channel_credentials,
    grpc_channel_options,
    grpc_server_credentials,
    join_run,
    names_of,
    names_of_auth_context,
    serve,
    server_context,
    tls,
    write_deployment,
)
from torchslicer.errors import SecurityError

pytestmark = pytest.mark.process

COORDINATOR, WORKER = Identity("run-1", "coordinator"), Identity("run-1", "worker-0")
DISTANT = 4_000_000_000


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("run-1")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Material:
    return authority.issue(COORDINATOR)


@pytest.fixture(scope="module")
def worker(authority: Authority) -> Material:
    return authority.issue(WORKER)


def meet(serving: Callable[[socket.socket], object], connecting: Callable[[socket.socket], object]):
    """Run both ends of one loopback connection; return what each gave or raised."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(5)

        def accept():
            raw, _ = listener.accept()
            with raw:
                raw.settimeout(5)
                return attempt(lambda: serving(raw))

        waiting = pool.submit(accept)
        with socket.create_connection(listener.getsockname(), 5) as raw:
            got = attempt(lambda: connecting(raw))
        return waiting.result(10), got


def attempt(function):
    try:
        return function()
    except (OSError, SecurityError) as error:
        return error


def echo(context: ssl.SSLContext):
    def serving(raw: socket.socket):
        with context.wrap_socket(raw, server_side=True) as connection:
            connection.sendall(connection.recv(100))
            return names_of(connection.getpeercert()), connection.version()

    return serving


def ask(context: ssl.SSLContext, name: str = COORDINATOR.dns_name):
    def connecting(raw: socket.socket):
        with context.wrap_socket(raw, server_hostname=name) as connection:
            connection.sendall(b"ping")
            # in TLS 1.3 a client learns only now that the server did not accept its certificate
            return connection.recv(100), names_of(connection.getpeercert())

    return connecting


def test_good_nodes_meet_and_know_each_other(server, worker):
    (client_names, version), (answer, server_names) = meet(echo(server_context(server)), ask(client_context(worker)))
    assert answer == b"ping"
    assert version == "TLSv1.3"
    assert check_pinned(client_names, [WORKER.uri]) == WORKER.uri
    assert check_pinned(server_names, ["other", COORDINATOR.uri]) == COORDINATOR.uri
    with pytest.raises(SecurityError, match="expected a node of torchslicer:run-1/worker-1"):
        check_pinned(client_names, ["torchslicer:run-1/worker-1"])


def test_files_of_certs_init_serve_as_well(tmp_path):
    write_deployment(tmp_path / "certs", ["worker-0"], hosts={"coordinator": ["127.0.0.1"]})

    def material(name: str) -> Material:
        return Material.from_files(*(tmp_path / "certs" / file for file in (f"{name}.pem", f"{name}.key", "ca.pem")))

    context = client_context(material("worker-0"))
    for name in ("127.0.0.1", "coordinator", Identity("fixed", "coordinator").dns_name):
        served, got = meet(echo(server_context(material("coordinator"))), ask(context, name))
        assert got[0] == b"ping"
        assert "torchslicer:fixed/worker-0" in served[0]


def test_certificates_of_others_serve_as_well():
    ca = trustme.CA()

    def material(*names: str) -> Material:
        leaf = ca.issue_cert(*names)
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        return Material(chain, SecretBytes(leaf.private_key_pem.bytes()), ca.cert_pem.bytes())

    served, got = meet(echo(server_context(material("host-a"))), ask(client_context(material("host-b")), "host-a"))
    assert got == (b"ping", {"host-a"})
    assert served[0] == {"host-b"}


def test_another_authority_is_refused_by_both_sides(server, worker):
    stranger = Authority.create("run-1")
    served, got = meet(echo(server_context(server)), ask(client_context(stranger.issue(WORKER))))
    assert isinstance(got, ssl.SSLCertVerificationError)
    # a client that trusts the server, but whose own certificate is a stranger's
    issued = stranger.issue(WORKER)
    mixed = Material(issued.certificate, issued.key, server.authority)
    served, got = meet(echo(server_context(server)), ask(client_context(mixed)))
    assert isinstance(served, ssl.SSLCertVerificationError)
    assert isinstance(got, OSError)


@pytest.mark.parametrize("name", ["worker-0", "127.0.0.1", "coordinator", WORKER.dns_name])
def test_another_name_is_refused(server, worker, name):
    _, got = meet(echo(server_context(server)), ask(client_context(worker), name))
    assert isinstance(got, ssl.SSLCertVerificationError)
    assert "mismatch" in str(got) or "doesn't match" in str(got)


def test_expired_certificates_are_refused_by_both_sides(authority, server, worker):
    past = datetime.now(timezone.utc) - timedelta(days=30)
    old = Authority.create("run-1", lifetime=timedelta(days=7), now=past)
    _, got = meet(
        echo(server_context(old.issue(COORDINATOR, now=past))), ask(client_context(old.issue(WORKER, now=past)))
    )
    assert isinstance(got, ssl.SSLCertVerificationError)
    assert "expired" in str(got)
    # only the client's is out of date
    issued = old.issue(WORKER, now=past)
    both = server.authority + old.certificate
    trusting = Material(server.certificate, server.key, both)
    served, _ = meet(
        echo(server_context(trusting)), ask(client_context(Material(issued.certificate, issued.key, both)))
    )
    assert isinstance(served, ssl.SSLCertVerificationError)
    assert "expired" in str(served)


def test_a_client_without_a_certificate_is_refused(server):
    bare = ssl.create_default_context(cadata=server.authority.decode())
    served, got = meet(echo(server_context(server)), ask(bare))
    assert isinstance(served, ssl.SSLError)
    assert isinstance(got, OSError)


def test_plain_text_and_old_tls_are_refused(server, worker):
    def plain(raw: socket.socket):
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return raw.recv(100)

    served, got = meet(echo(server_context(server)), plain)
    assert isinstance(served, ssl.SSLError)
    assert isinstance(got, OSError) or b"200" not in got

    old = client_context(worker)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    served, got = meet(echo(server_context(server)), ask(old))
    assert isinstance(served, ssl.SSLError)
    assert isinstance(got, ssl.SSLError)


def test_material_that_does_not_belong_together_is_refused_without_showing_the_key(server, worker):
    encrypted = trustme.CA().issue_cert("a").private_key_pem.bytes().replace(b"\n", b"\nProc-Type: 4,ENCRYPTED\n", 1)
    wrong = [
        Material(server.certificate, worker.key, server.authority),
        Material(b"garbage", server.key, server.authority),
        Material(server.certificate, SecretBytes(b"garbage"), server.authority),
        Material(server.certificate, SecretBytes(encrypted), server.authority),
        Material(server.certificate, server.key, b"garbage"),
        Material(server.certificate, server.key, b"\xff"),
    ]
    for material in wrong:
        for make in (server_context, client_context):
            with pytest.raises(SecurityError, match="belong together") as caught:
                make(material)
            assert "PRIVATE" not in f"{caught.value}{material!r}"
            assert caught.value.__suppress_context__


def test_an_encrypted_key_is_refused_without_asking_the_terminal(server):
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(server.key.reveal(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    )
    with pytest.raises(SecurityError, match="not encrypted"):
        server_context(Material(server.certificate, SecretBytes(locked), server.authority))


def open_files():
    """Return what the descriptors of this process stand for."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of this listing
            links.append(str(descriptor.readlink()))
    return Counter(links)


@pytest.mark.parametrize("in_memory", [True, False])
def test_the_key_never_lies_in_a_file_that_stays_or_that_others_can_read(
    server, worker, tmp_path, monkeypatch, in_memory
):
    seen = []
    monkeypatch.setattr(tls.tempfile, "tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.setattr(tls, "_memory_file", lambda: None)

    genuine = ssl.SSLContext.load_cert_chain

    def spy(context, path, **options):
        folder = Path(path).parent
        seen.append((str(folder), Path(path).stat().st_mode & 0o777, folder.stat().st_mode & 0o777))
        genuine(context, path, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    gc.collect()  # what earlier tests left would be closed in between
    before = open_files()
    _, got = meet(echo(server_context(server)), ask(client_context(worker)))
    assert got[0] == b"ping"
    assert open_files() <= before
    assert list(tmp_path.iterdir()) == []
    assert len(seen) == 2
    for folder, file_mode, folder_mode in seen:
        assert folder == "/proc/self/fd" if in_memory else (file_mode, folder_mode) == (0o600, 0o700)


# ------------------------------------------------------------------------------------------------------------ joining


class Port:
    """A join port on loopback; every connection is served in turn until the test is over."""

    def __init__(self, authority: Authority, server: Material, *, slots: int = 2, deadline_s: float = 5.0) -> None:
        self.joining = JoinString.create("run-1", authority.fingerprint, expires_at=DISTANT)
        self.server = JoinServer(authority, self.joining, leaf=server.certificate, slots=slots)
        self._context = server_context(server, require_client=False)
        self._deadline_s = deadline_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self.served: list[str | None] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _run(self) -> None:
        while True:
            raw, source = self._listener.accept()
            if self._over:
                raw.close()
                return
            self.served.append(serve(raw, self._context, self.server, source[0], deadline_s=self._deadline_s))

    def __enter__(self) -> Self:
        self._over = False
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(10)
        self._listener.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self._listener.getsockname(), 5)


def test_a_node_joins_and_then_speaks_mutual_tls(authority, server):
    with Port(authority, server) as port:
        material = join_run(port.address, port.joining, "worker-0")
    assert port.served == ["worker-0"]
    served, got = meet(echo(server_context(server)), ask(client_context(material)))
    assert got[0] == b"ping"
    assert check_pinned(served[0], [WORKER.uri]) == WORKER.uri
    # and as a server for another node
    with Port(authority, server) as port:
        other = join_run(port.address, port.joining, "worker-1")
    _, got = meet(echo(server_context(material)), ask(client_context(other), WORKER.dns_name))
    assert got[0] == b"ping"


def test_a_worker_meets_an_impostor(authority, server):
    genuine = JoinString.create("run-1", authority.fingerprint, expires_at=DISTANT)
    stranger = Authority.create("run-1")
    with Port(stranger, stranger.issue(COORDINATOR)) as port:
        with pytest.raises(SecurityError, match="fingerprint is not the one"):
            join_run(port.address, genuine, "worker-0")
        assert port.server.joined == set()


def test_a_wrong_token_gets_nobody_in(authority, server):
    wrong = JoinString.create("run-1", authority.fingerprint, expires_at=DISTANT)
    with Port(authority, server) as port:
        with pytest.raises(SecurityError, match="not this run's"):
            join_run(port.address, wrong, "worker-0")
        join_run(port.address, port.joining, "worker-0")
    assert port.served == [None, "worker-0"]


def test_garbage_leaves_the_port_alive(authority, server):
    with Port(authority, server, deadline_s=0.3) as port:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\x40\x00" + bytes(100)):
            with port.connect() as raw:
                raw.sendall(garbage)
        with port.connect() as raw:  # half open: nothing is ever sent
            assert raw.recv(1) == b""
        anyone = tls.joining_context()
        for frame in ((1 << 31).to_bytes(4, "big"), bytes(4), b"\0\0\0\x05ab", b"\0\0\0\x02{}"):
            with port.connect() as raw, anyone.wrap_socket(raw) as connection:
                connection.sendall(frame)
                try:
                    while connection.recv(100):
                        pass
                except OSError:
                    pass
        assert port.server.joined == set()
    with Port(authority, server) as port:
        join_run(port.address, port.joining, "worker-0")


def test_a_worker_does_not_wait_for_a_silent_or_foreign_coordinator(authority):
    joining = JoinString.create("run-1", authority.fingerprint, expires_at=DISTANT)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        join_run(f"127.0.0.1:{silent.getsockname()[1]}", joining, "worker-0", timeout_s=0.2)
    _, got = meet(
        lambda raw: raw.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10),
        lambda raw: tls.joining_context().wrap_socket(raw),
    )
    assert isinstance(got, ssl.SSLError)


def test_a_node_with_a_certificate_may_use_the_join_port_only_if_it_is_good(server, worker):
    context = server_context(server, require_client=False)
    served, _ = meet(echo(context), ask(client_context(worker)))
    assert WORKER.uri in served[0]
    stranger = Authority.create("run-1").issue(WORKER)
    served, _ = meet(echo(context), ask(client_context(Material(stranger.certificate, stranger.key, server.authority))))
    assert isinstance(served, ssl.SSLCertVerificationError)


# --------------------------------------------------------------------------------------------------------------- gRPC


def test_grpc_speaks_with_the_same_material(server, worker):
    grpc = pytest.importorskip("grpc")
    seen = []

    def hello(request, context):
        seen.append(names_of_auth_context(context.auth_context()))
        return request

    handler = grpc.method_handlers_generic_handler("ts", {"hello": grpc.unary_unary_rpc_method_handler(hello)})
    stranger = Authority.create("run-1").issue(WORKER)
    mixed = Material(stranger.certificate, stranger.key, server.authority)
    with ThreadPoolExecutor(2) as pool:
        serving = grpc.server(pool, handlers=[handler])
        port = serving.add_secure_port("127.0.0.1:0", grpc_server_credentials(server))
        serving.start()

        def call(material: Material | None, name: str = COORDINATOR.dns_name):
            address, options = f"127.0.0.1:{port}", grpc_channel_options(name)
            channel = (
                grpc.insecure_channel(address)
                if material is None
                else grpc.secure_channel(address, grpc_channel_credentials(material), options)
            )
            with channel:
                return channel.unary_unary("/ts/hello")(b"ping", timeout=5)

        assert call(worker) == b"ping"
        assert check_pinned(seen[0], [WORKER.uri]) == WORKER.uri
        for material, name in (
            (None, ""),
            (stranger, COORDINATOR.dns_name),
            (mixed, COORDINATOR.dns_name),
            (worker, "x"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(material, name)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        serving.stop(0).wait(5)
    assert len(seen) == 1

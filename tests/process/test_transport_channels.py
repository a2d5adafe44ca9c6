"""Every kind of channel passes the public suite: memory, TCP, UNIX socket, TLS, gRPC, gRPC with TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import grpc
import pytest
import trustme

from torchslicer.testing import ChannelConformance
from torchslicer.transport import TcpListener, choose_endpoint, connect, memory_pair
from torchslicer.transport import grpc as channels
from torchslicer.transport.base import Channel, ChannelOptions

pytestmark = pytest.mark.process
Pair = Iterator[tuple[Channel, Channel]]


class TestMemory(ChannelConformance):
    @contextlib.contextmanager
    def pair(self, options: ChannelOptions) -> Pair:
        left, right = memory_pair(options)
        yield left, right
        left.close()
        right.close()


class TestTcp(ChannelConformance):
    bind = "127.0.0.1:0"

    def server_tls(self) -> ssl.SSLContext | None:
        return None

    def client_tls(self) -> ssl.SSLContext | None:
        return None

    def address(self, listener: TcpListener) -> str:
        return listener.address

    @contextlib.contextmanager
    def pair(self, options: ChannelOptions) -> Pair:
        listener = TcpListener(self.bind, tls=self.server_tls(), local=True, options=options)
        with contextlib.ExitStack() as stack:
            stack.callback(listener.close)
            pool = stack.enter_context(ThreadPoolExecutor(1))
            connecting = pool.submit(
                connect, self.address(listener), timeout_s=10, tls=self.client_tls(), options=options
            )
            right = listener.accept(timeout_s=10)
            stack.callback(right.close)
            right.start(timeout_s=10)  # with TLS, both sides of a handshake must be there
            left = connecting.result(10)
            stack.callback(left.close)
            yield left, right


class TestIpv6(TestTcp):
    bind = "[::1]:0"


class TestUnix(TestTcp):
    def address(self, listener: TcpListener) -> str:
        address = choose_endpoint(listener.endpoints).address
        assert address.startswith("unix:")
        return address


class TestTcpReadingAhead(TestTcp):
    @contextlib.contextmanager
    def pair(self, options: ChannelOptions) -> Pair:
        with super().pair(dataclasses.replace(options, read_ahead_bytes=4 << 20)) as both:
            yield both


@lru_cache(maxsize=1)
def authority() -> tuple[trustme.CA, trustme.LeafCert]:
    ca = trustme.CA()
    return ca, ca.issue_cert("127.0.0.1")


class TestTls(TestTcp):
    def server_tls(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_tls(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        context, (ca, node) = ssl.SSLContext(side), authority()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        ca.configure_trust(context)
        node.configure_cert(context)
        return context

    def test_both_sides_know_the_names_of_the_other(self) -> None:
        with self.pair(ChannelOptions()) as (left, right):
            assert left.peer_names == ("127.0.0.1",)
            assert right.peer_names == ("127.0.0.1",)


class TestGrpc(ChannelConformance):
    def server_credentials(self) -> Any:
        return None

    def client_credentials(self) -> Any:
        return None

    @contextlib.contextmanager
    def pair(self, options: ChannelOptions) -> Pair:
        listener = channels.GrpcListener("127.0.0.1:0", credentials=self.server_credentials(), options=options)
        left = channels.connect(listener.address, timeout_s=10, credentials=self.client_credentials(), options=options)
        right = listener.accept(timeout_s=5)
        yield left, right
        left.close()
        right.close()
        listener.close()


class TestGrpcTls(TestGrpc):
    def server_credentials(self) -> Any:
        ca, node = authority()
        pair = (node.private_key_pem.bytes(), node.cert_chain_pems[0].bytes())
        return grpc.ssl_server_credentials([pair], ca.cert_pem.bytes(), require_client_auth=True)

    def client_credentials(self) -> Any:
        ca, node = authority()
        return grpc.ssl_channel_credentials(
            ca.cert_pem.bytes(), node.private_key_pem.bytes(), node.cert_chain_pems[0].bytes()
        )

    def test_the_server_knows_the_names_of_the_client(self) -> None:
        with self.pair(ChannelOptions()) as (_, right):
            assert right.peer_names == ("127.0.0.1",)

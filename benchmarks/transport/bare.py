"""The connections to compare with: a socket and a gRPC byte stream with nothing around them."""

from __future__ import annotations

import os
import queue
import socket
import ssl
import struct
from collections.abc import Iterator
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any

import grpc
from certificates import Certificates

ORDER = struct.Struct("!BQQ")  # there and back?, size, count
NO_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def fill(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:])
        if not count:
            raise EOFError
        done += count


class BareSocket:
    """Sends one buffer again and again, and receives into one."""

    def __init__(self, sock: socket.socket, largest: int) -> None:
        self.sock = sock
        self.outgoing, self.incoming = memoryview(bytearray(os.urandom(largest))), memoryview(bytearray(largest))

    def one_way(self, size: int, count: int) -> None:
        self.sock.sendall(ORDER.pack(0, size, count))
        for _ in range(count):
            self.sock.sendall(self.outgoing[:size])
        fill(self.sock, self.incoming[:1])

    def there_and_back(self, size: int, count: int) -> None:
        self.sock.sendall(ORDER.pack(1, size, count))
        for _ in range(count):
            self.sock.sendall(self.outgoing[:size])
            fill(self.sock, self.incoming[:size])

    def close(self) -> None:
        self.sock.close()


def answer_socket(sock: socket.socket, largest: int) -> None:
    buffer, order = memoryview(bytearray(largest)), memoryview(bytearray(ORDER.size))
    while True:
        try:
            fill(sock, order)
        except EOFError:
            return
        back, size, count = ORDER.unpack(order)
        for _ in range(count):
            fill(sock, buffer[:size])
            if back:
                sock.sendall(buffer[:size])
        if not back:
            sock.sendall(b"x")


class BareStream:
    """Whole messages over one bidirectional stream, made of bytes that exist already."""

    def __init__(self, channel: grpc.Channel, sizes: list[int]) -> None:
        self.channel, self.messages = channel, {size: os.urandom(size) for size in sizes}
        self.queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.replies = channel.stream_stream("/bare/Echo")(iter(self.queue.get, None))

    def one_way(self, size: int, count: int) -> None:
        self.queue.put(ORDER.pack(0, size, count))
        for _ in range(count):
            self.queue.put(self.messages[size])
        next(self.replies)

    def there_and_back(self, size: int, count: int) -> None:
        self.queue.put(ORDER.pack(1, size, count))
        for _ in range(count):
            self.queue.put(self.messages[size])
            next(self.replies)

    def close(self) -> None:
        self.queue.put(None)
        self.channel.close()


def echo(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:  # noqa: ARG001
    for order in requests:
        back, _, count = ORDER.unpack(order)
        for _ in range(count):
            message = next(requests)
            if back:
                yield message
        if not back:
            yield b"x"


def serve(kind: str, pipe: Connection, path: str, certificates: Certificates | None, largest: int) -> None:
    if kind.startswith("grpc"):
        server = grpc.server(futures.ThreadPoolExecutor(4), options=NO_LIMIT)
        handler = grpc.stream_stream_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Echo": handler}),))
        if kind == "grpc-tls" and certificates:
            port = server.add_secure_port("127.0.0.1:0", certificates.grpc_server())
        else:
            port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        pipe.send(f"127.0.0.1:{port}")
        server.wait_for_termination()
        return
    listening = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    listening.bind(path if kind == "unix" else ("127.0.0.1", 0))
    listening.listen(1)
    pipe.send(path if kind == "unix" else f"127.0.0.1:{listening.getsockname()[1]}")
    sock, _ = listening.accept()
    if kind != "unix":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "tls" and certificates:
        sock = certificates.server().wrap_socket(sock, server_side=True)
    answer_socket(sock, largest)


def connect(kind: str, address: str, certificates: Certificates, sizes: list[int]) -> BareSocket | BareStream:
    if kind == "grpc":
        return BareStream(grpc.insecure_channel(address, options=NO_LIMIT), sizes)
    if kind == "grpc-tls":
        return BareStream(grpc.secure_channel(address, certificates.grpc_client(), options=NO_LIMIT), sizes)
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return BareSocket(sock, max(sizes))
    host, _, port = address.partition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "tls":
        context: ssl.SSLContext = certificates.client()
        sock = context.wrap_socket(sock, server_hostname="127.0.0.1")
    return BareSocket(sock, max(sizes))

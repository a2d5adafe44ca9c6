"""Would shared memory be quicker than a UNIX socket between two processes of a host? (docs/decisions/0005)

    python benchmarks/transport/shared_memory.py

Three ways to bring a tensor from one process into the other: through a UNIX socket; through shared memory, copied in
and out; through shared memory, copied in only (the receiver would use it where it lies). A byte answers each message.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable

import torch

SIZES = {"256 KiB": 256 << 10, "512 KiB": 512 << 10, "2 MiB": 2 << 20}
COUNT, ROUNDS, SLOTS = 400, 5, 8
BUFFER_BYTES = 4 << 20


def fill(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += sock.recv_into(view[done:])


class Side:
    """One of the two processes."""

    def __init__(self, sock: socket.socket, memory: mmap.mmap, size: int) -> None:
        self.sock, self.size = sock, size
        self.shared = torch.frombuffer(memory, dtype=torch.uint8)
        self.own = [torch.ones(size, dtype=torch.uint8) for _ in range(SLOTS)]

    def slot(self, index: int) -> torch.Tensor:
        return self.shared[(index % SLOTS) * self.size :][: self.size]

    def send_by_socket(self, index: int) -> None:
        self.sock.sendall(memoryview(self.own[index % SLOTS].numpy()))

    def receive_by_socket(self, index: int) -> None:
        fill(self.sock, memoryview(self.own[index % SLOTS].numpy()))

    def send_by_memory(self, index: int) -> None:
        self.slot(index).copy_(self.own[index % SLOTS])
        self.sock.send(b"y")

    def receive_by_memory(self, index: int) -> None:
        self.sock.recv(1)
        self.own[index % SLOTS].copy_(self.slot(index))

    def receive_in_place(self, index: int) -> None:
        self.sock.recv(1)

    def sending(self, send: Callable[[int], None]) -> None:
        for index in range(COUNT):
            send(index)
            self.sock.recv(1)

    def receiving(self, receive: Callable[[int], None]) -> None:
        for index in range(COUNT):
            receive(index)
            self.sock.send(b"x")


WAYS = {
    "UNIX socket": ("send_by_socket", "receive_by_socket"),
    "shared memory, copied in and out": ("send_by_memory", "receive_by_memory"),
    "shared memory, copied in": ("send_by_memory", "receive_in_place"),
}


def measure(label: str, size: int) -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    for sock in (here, there):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    memory = mmap.mmap(-1, SLOTS * size)  # shared with the child
    child = os.fork()
    side = Side(there if child == 0 else here, memory, size)
    best: dict[str, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        for way, (send, receive) in WAYS.items():
            wall, cpu = time.perf_counter(), time.process_time()
            if child == 0:
                side.receiving(getattr(side, receive))
            else:
                side.sending(getattr(side, send))
            took = (time.perf_counter() - wall) / COUNT * 1e6, (time.process_time() - cpu) / COUNT * 1e6
            best[way] = min(best.get(way, took), took)
    name = "receiver" if child == 0 else "sender  "
    text = [
        f"{label:8} {name} {way:33} {wall:6.0f} us a message, {cpu:5.0f} us of a core"
        for way, (wall, cpu) in best.items()
    ]
    if child == 0:
        here.close()
        print("\n".join(text), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("\n".join(text), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for label, size in SIZES.items():
        measure(label, size)

"""How close the channels come to bare sockets and bare gRPC streams, one way and there and back.

    python benchmarks/transport/run.py [--quick] [--only tcp unix grpc tls grpc-tls] [--rounds 61] [--json FILE]

README.md beside this file says how each number is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import bare
import torch
from certificates import Certificates, make_certificates

from torchslicer.cluster.heap import keep_freed_memory
from torchslicer.transport import Frame, FrameKind, TcpListener
from torchslicer.transport import connect as connect_tcp
from torchslicer.transport import grpc as channels
from torchslicer.transport.base import Channel

SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20, "16 MiB": 16 << 20}
WAIT_S = 60.0
PAIRS = ("tcp", "unix", "grpc", "tls", "grpc-tls")


class Subject(Protocol):
    """A connection under test, seen from the side that measures."""

    def one_way(self, size: int, count: int) -> None: ...
    def there_and_back(self, size: int, count: int) -> None: ...
    def close(self) -> None: ...


class OurChannel:
    """A channel of TorchSlicer: everything a training run does with it, tensors made anew on both sides included."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.tensors = {
            size: torch.randint(0, 255, (size,), dtype=torch.uint8).view(torch.float32) for size in SIZES.values()
        }

    def one_way(self, size: int, count: int) -> None:
        self._order("one_way", count)
        for index in range(count):
            self.channel.send(self._frame(size, index), timeout_s=WAIT_S)
        self.channel.receive(timeout_s=WAIT_S)

    def there_and_back(self, size: int, count: int) -> None:
        self._order("there_and_back", count)
        for index in range(count):
            self.channel.send(self._frame(size, index), timeout_s=WAIT_S)
            self.channel.receive(timeout_s=WAIT_S)

    def _order(self, mode: str, count: int) -> None:
        self.channel.send(Frame.of_message({"mode": mode, "count": count}), timeout_s=WAIT_S)

    def _frame(self, size: int, index: int) -> Frame:
        return Frame.of_tensor(FrameKind.FORWARD, self.tensors[size], microbatch=index)

    def close(self) -> None:
        self.channel.send(Frame.of_message({"mode": "end", "count": 0}), timeout_s=WAIT_S)
        self.channel.close()


def answer(channel: Channel) -> None:
    """The other side of :class:`OurChannel`."""
    while (order := channel.receive(timeout_s=WAIT_S).message())["mode"] != "end":
        for _ in range(order["count"]):
            frame = channel.receive(timeout_s=WAIT_S)
            if order["mode"] == "there_and_back":
                channel.send(Frame.of_tensor(FrameKind.BACKWARD, frame.tensor()), timeout_s=WAIT_S)
        if order["mode"] == "one_way":
            channel.send(Frame.of_message({"op": "done"}), timeout_s=WAIT_S)
    channel.close()


def serve(name: str, pipe: Connection, path: str, certificates: Certificates | None) -> None:
    """Run one subject's other side in a process of its own."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    kind, ours = name.removeprefix("our "), name.startswith("our ")
    if not ours:
        bare.serve(kind, pipe, path, certificates, max(SIZES.values()))
        return
    if kind.startswith("grpc"):
        listener: Any = channels.GrpcListener(
            "127.0.0.1:0", credentials=certificates.grpc_server() if kind == "grpc-tls" and certificates else None
        )
    else:
        listener = TcpListener(
            f"unix:{path}" if kind == "unix" else "127.0.0.1:0",
            tls=certificates.server() if kind == "tls" and certificates else None,
        )
    pipe.send(listener.address)
    answer(listener.accept(timeout_s=WAIT_S))
    listener.close()


def connect(name: str, address: str, certificates: Certificates) -> Subject:
    kind = name.removeprefix("our ")
    if not name.startswith("our "):
        return bare.connect(kind, address, certificates, list(SIZES.values()))
    if kind == "grpc":
        return OurChannel(channels.connect(address, timeout_s=WAIT_S))
    if kind == "grpc-tls":
        return OurChannel(channels.connect(address, timeout_s=WAIT_S, credentials=certificates.grpc_client()))
    tls = certificates.client() if kind == "tls" else None
    return OurChannel(connect_tcp(address, timeout_s=WAIT_S, tls=tls))


@contextlib.contextmanager
def started(name: str, folder: str, certificates: Certificates) -> Iterator[Subject]:
    context = get_context("spawn")
    here, there = context.Pipe()
    path = f"{folder}/{name.replace(' ', '-')}"
    process = context.Process(target=serve, args=(name, there, path, certificates), daemon=True)
    process.start()
    if not here.poll(WAIT_S):
        raise SystemExit(f"the process for {name!r} did not start")
    subject = connect(name, here.recv(), certificates)
    yield subject
    subject.close()
    process.join(10)
    process.kill()


@dataclass(frozen=True)
class Measured:
    """Seconds a message in each round, of the bare connection and of ours."""

    bare: list[float]
    ours: list[float]

    def ratios(self) -> tuple[float, float]:
        """The speed of ours as a part of the bare one's: of the medians, and of the quickest tenths.

        Other processes on the machine only ever make a round longer, and hit the one with more to do more often.
        """
        return _median(self.bare) / _median(self.ours), _tenth(self.bare) / _tenth(self.ours)


def _median(times: list[float]) -> float:
    return statistics.median(times)


def _tenth(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def measure(pair: tuple[Subject, Subject], mode: str, size: int, *, rounds: int, budget: int) -> Measured:
    count = max(2, min(200, budget // size))
    calls: list[Callable[[int, int], None]] = [getattr(subject, mode) for subject in pair]
    times: tuple[list[float], list[float]] = ([], [])
    for call in calls:
        call(size, max(2, count // 4))
    for round_ in range(rounds):
        # Who begins alternates, so that a load that grows or fades favours nobody.
        for which in (0, 1) if round_ % 2 == 0 else (1, 0):
            start = time.perf_counter()
            calls[which](size, count)
            times[which].append((time.perf_counter() - start) / count)
    return Measured(*times)


def show(kind: str, mode: str, label: str, size: int, found: Measured) -> dict[str, Any]:
    median, quick = found.ratios()
    bare_s, ours_s = _tenth(found.bare), _tenth(found.ours)
    if mode == "one_way":
        values = f"{size / bare_s / 1e9:8.2f} {size / ours_s / 1e9:8.2f} GB/s"
    else:
        values = f"{bare_s * 1e6:8.0f} {ours_s * 1e6:8.0f} us  "
    print(f"{kind:9} {mode:15} {label:8} {values}   {quick:6.1%}   {median:6.1%}", flush=True)
    return {
        "kind": kind, "mode": mode, "size": size, "bare_us": bare_s * 1e6, "ours_us": ours_s * 1e6,
        "median_bare_us": _median(found.bare) * 1e6, "median_ours_us": _median(found.ours) * 1e6,
        "ratio": quick, "ratio_of_medians": median,
    }  # fmt: skip


def run(kinds: Sequence[str], sizes: dict[str, int], *, rounds: int, budget: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        certificates = make_certificates(Path(folder))
        for kind in kinds:
            with started(kind, folder, certificates) as plain, started(f"our {kind}", folder, certificates) as ours:
                for mode in ("one_way", "there_and_back"):
                    for label, size in sizes.items():
                        found = measure((plain, ours), mode, size, rounds=rounds, budget=budget)
                        rows.append(show(kind, mode, label, size, found))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    now = dt.datetime.now(dt.timezone.utc)
    print(f"# {now:%Y-%m-%d %H:%M} UTC, {platform.machine()}, torch {torch.__version__}")
    print("kind      mode            size         bare     ours         ours/bare  of medians")
    rows = run(
        options.only,
        {label: SIZES[label] for label in options.sizes},
        rounds=options.rounds or (21 if options.quick else 61),
        budget=32 << 20,
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

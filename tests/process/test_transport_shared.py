"""Tensors that two processes of a host exchange in memory that both map."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchslicer.errors import DeadlineError, FrameError, PeerClosedError
from torchslicer.transport import Frame, FrameKind, TcpListener, choose_endpoint, connect
from torchslicer.transport.base import Channel, ChannelOptions
from torchslicer.transport.frame import encode_header, with_block
from torchslicer.transport.shared import AVAILABLE, Lender

pytestmark = [pytest.mark.process, pytest.mark.skipif(not AVAILABLE, reason="Linux only")]
WAIT_S = 20.0
BLOCK_BYTES = 256 << 10


@contextlib.contextmanager
def unix_pair(options: ChannelOptions | None = None) -> Iterator[tuple[Channel, Channel]]:
    listener = TcpListener("127.0.0.1:0", local=True, options=options)
    address = choose_endpoint(listener.endpoints).address
    assert address.startswith("unix:")
    left = connect(address, timeout_s=WAIT_S, options=options)
    right = listener.accept(timeout_s=WAIT_S)
    try:
        yield left, right
    finally:
        for each in (left, right, listener):
            each.close()


@contextlib.contextmanager
def stranger() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket, and the channel that listens to it."""
    listener = TcpListener("127.0.0.1:0", local=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bare:
        bare.connect(choose_endpoint(listener.endpoints).address.removeprefix("unix:"))
        channel = listener.accept(timeout_s=WAIT_S)
        try:
            yield bare, channel
        finally:
            channel.close()
            listener.close()


def numbered(number: int, num_bytes: int = BLOCK_BYTES) -> torch.Tensor:
    return torch.full((num_bytes // 4,), number, dtype=torch.int32)


def pass_on(left: Channel, right: Channel, tensor: torch.Tensor, kind: FrameKind = FrameKind.FORWARD) -> torch.Tensor:
    left.send(Frame.of_tensor(kind, tensor), timeout_s=WAIT_S)
    return right.receive(timeout_s=WAIT_S).tensor()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in memory without a name that another process may map."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd:torchslicer" in line
    return False


def descriptors() -> set[str]:
    """Return number and target of every open descriptor.

    Compare with what is new, not counts: what earlier tests left may be closed by the garbage collector at any time.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own, which is closed by now
            found.add(f"{entry.name} {entry.readlink()}")
    return found


@pytest.mark.parametrize("kind", [FrameKind.FORWARD, FrameKind.BACKWARD, FrameKind.INPUT, FrameKind.TARGET])
def test_what_lives_for_a_step_is_used_where_it_lies(kind: FrameKind) -> None:
    with unix_pair() as (left, right):
        found = pass_on(left, right, numbered(7), kind)
        assert is_shared(found)
        assert torch.equal(found, numbered(7))
        assert is_shared(pass_on(right, left, numbered(8), kind))


@pytest.mark.parametrize("kind", [FrameKind.STATE, FrameKind.OUTPUT])
def test_what_others_keep_has_memory_of_its_own(kind: FrameKind) -> None:
    with unix_pair() as (left, right):
        assert not is_shared(pass_on(left, right, numbered(7), kind))


def test_small_tensors_go_through_the_socket() -> None:
    with unix_pair() as (left, right):
        assert not is_shared(pass_on(left, right, torch.ones(100)))


def test_a_block_is_used_again_once_the_tensor_is_freed_and_not_before() -> None:
    with unix_pair() as (left, right):
        first, second = (pass_on(left, right, numbered(n)) for n in (1, 2))
        assert first.data_ptr() != second.data_ptr()
        view, address = first[5:].view(torch.float32), first.data_ptr()
        del first  # the view keeps the memory
        assert pass_on(left, right, numbered(3)).data_ptr() != address
        assert torch.equal(view.view(torch.int32), numbered(1)[5:])
        del view
        assert pass_on(left, right, numbered(4)).data_ptr() == address
        assert torch.equal(second, numbered(2))


def test_autograd_keeps_what_it_saved() -> None:
    with unix_pair() as (left, right):
        x = pass_on(left, right, torch.randn(BLOCK_BYTES // 4)).requires_grad_()
        value, want = (x * x).sum(), 2 * x.detach().clone()
        address = x.data_ptr()
        held = [pass_on(left, right, numbered(n)) for n in range(3)]
        assert address not in [each.data_ptr() for each in held]
        value.backward()
        assert torch.equal(x.grad, want)


def test_where_nothing_is_free_the_socket_carries_it() -> None:
    with unix_pair(ChannelOptions(send_queue_bytes=4 * BLOCK_BYTES)) as (left, right):
        found = [pass_on(left, right, numbered(n)) for n in range(10)]
        assert 2 <= sum(is_shared(each) for each in found) <= 4
        for number, each in enumerate(found):
            assert torch.equal(each, numbered(number))


def test_other_sizes_take_the_place_of_those_that_were() -> None:
    with unix_pair(ChannelOptions(send_queue_bytes=16 * BLOCK_BYTES)) as (left, right):
        for size in (BLOCK_BYTES, 6 * BLOCK_BYTES, BLOCK_BYTES // 2, 3 * BLOCK_BYTES):
            for number in range(10):
                found = pass_on(left, right, numbered(number, size))
                assert is_shared(found), (size, number)
                assert torch.equal(found, numbered(number, size))


def test_a_tensor_outlives_the_channel() -> None:
    with unix_pair() as (left, right):
        found = pass_on(left, right, numbered(9))
    gc.collect()
    assert torch.equal(found, numbered(9))


def test_a_process_that_was_forked_gives_nothing_back() -> None:
    with unix_pair() as (left, right):
        found = [pass_on(left, right, numbered(1))]
        child = os.fork()
        if child == 0:
            found.clear()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        later = [pass_on(left, right, numbered(n)) for n in range(2, 5)]
        assert torch.equal(found[0], numbered(1))
        assert len({each.data_ptr() for each in found + later}) == 4


def test_nothing_is_left_open() -> None:
    with unix_pair() as (left, right):  # whatever is opened once for good
        pass_on(left, right, numbered(1))
    gc.collect()
    before = descriptors()
    for _ in range(5):
        with unix_pair() as (left, right):
            pass_on(left, right, numbered(1))
            pass_on(right, left, numbered(1))
    gc.collect()
    assert not descriptors() - before
    assert "memfd:torchslicer" not in Path("/proc/self/maps").read_text()


def test_a_system_without_such_memory_uses_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with unix_pair() as (left, right):
        found = [pass_on(left, right, numbered(n)) for n in range(3)]
        assert not any(is_shared(each) for each in found)
        assert torch.equal(found[2], numbered(2))


def test_the_memory_keeps_its_size() -> None:
    lender = Lender(BLOCK_BYTES)
    try:
        assert lender.descriptor is not None
        for size in (0, 2 * BLOCK_BYTES):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(lender.descriptor, size)
    finally:
        lender.given()


# -- what a stranger may try ------------------------------------------------------------------------------------------


def placed(block: int) -> bytes:
    return with_block(encode_header(Frame.of_tensor(FrameKind.FORWARD, numbered(1)).header), block)


def send_with(bare: socket.socket, data: bytes, *descriptors: int) -> None:
    bare.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


@pytest.mark.parametrize(
    ("block", "problem"),
    [(4096, "no descriptor came"), (64, "no descriptor came"), ((1 << 64) - 64, "no descriptor came")],
)
def test_a_block_without_memory_is_refused(block: int, problem: str) -> None:
    with stranger() as (bare, channel):
        bare.sendall(placed(block))
        with pytest.raises(FrameError, match=problem):
            channel.receive(timeout_s=WAIT_S)


@pytest.mark.parametrize("block", [1, 63, 65, BLOCK_BYTES, 4 * BLOCK_BYTES, 1 << 40, (1 << 64) - 64])
def test_a_block_that_cannot_be_is_refused(block: int) -> None:
    lender = Lender(2 * BLOCK_BYTES - 4096)
    assert lender.descriptor is not None
    with stranger() as (bare, channel):
        send_with(bare, placed(block), lender.descriptor)
        with pytest.raises(FrameError, match=f"cannot lie at {block} of"):
            channel.receive(timeout_s=WAIT_S)
    lender.given()


def test_a_message_cannot_lie_in_shared_memory() -> None:
    lender = Lender(BLOCK_BYTES)
    assert lender.descriptor is not None
    with stranger() as (bare, channel):
        header = encode_header(Frame.of_message({"op": "hello"}).header)
        send_with(bare, with_block(header, 64), lender.descriptor)
        with pytest.raises(FrameError, match="cannot lie at 64"):
            channel.receive(timeout_s=WAIT_S)
    lender.given()


@pytest.mark.parametrize("what", ["file", "pipe", "without seals", "empty"])
def test_other_descriptors_are_refused(what: str, tmp_path: Path) -> None:
    foreign = {
        "file": lambda: [os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)],
        "pipe": lambda: list(os.pipe()),
        "without seals": lambda: [os.memfd_create("other", os.MFD_ALLOW_SEALING)],
        "empty": lambda: [os.memfd_create("other")],
    }[what]()
    try:
        before = descriptors()
        with stranger() as (bare, channel):
            send_with(bare, placed(64), foreign[0])
            with pytest.raises(FrameError, match="shared memory"):
                channel.receive(timeout_s=WAIT_S)
        assert not descriptors() - before
    finally:
        for descriptor in foreign:
            os.close(descriptor)


def test_a_flood_of_descriptors_leaves_none_open() -> None:
    before = descriptors()
    with stranger() as (bare, channel):
        at_first = descriptors()
        for _ in range(40):  # less than a header
            send_with(bare, b"TSLF", *[bare.fileno()] * 10)
            with contextlib.suppress(FrameError, PeerClosedError, DeadlineError):
                channel.receive(timeout_s=0)
            assert len(descriptors() - at_first) <= 2
    assert not descriptors() - before


def test_tcp_takes_no_blocks() -> None:
    listener = TcpListener("127.0.0.1:0")
    host, port = listener.address.split(":")
    with socket.create_connection((host, int(port))) as bare:
        channel = listener.accept(timeout_s=WAIT_S)
        bare.sendall(placed(64))
        with pytest.raises(FrameError, match="unexpected block of shared memory"):
            channel.receive(timeout_s=WAIT_S)
        channel.close()
    listener.close()

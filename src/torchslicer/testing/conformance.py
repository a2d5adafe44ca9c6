"""The suite that every channel passes.

Derive from it, say how a connected pair is made, and let pytest run it::

class TestMyChannel(ChannelConformance):
    @contextlib.contextmanager
    def pair(self, options):
        left, right = my_pair(options)
        yield left, right
        left.close()
        right.close()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from torchslicer.errors import DeadlineError, FrameError, PeerClosedError, TransportError
from torchslicer.testing.faulty import FaultyChannel
from torchslicer.transport.base import Channel, ChannelOptions
from torchslicer.transport.dtypes import CODE_OF_DTYPE, bits_of
from torchslicer.transport.frame import Frame, FrameFlags, FrameHeader, FrameKind, FrameLimits

WAIT_S = 20.0
SOON_S = 0.05
Error = TypeVar("Error", bound=BaseException)


def expect_error(kind: type[Error], call: Callable[[], object]) -> Error:
    """Return the error of *kind* that *call* raises.

    Raises:
        AssertionError: It raises none.

    >>> expect_error(ZeroDivisionError, lambda: 1 / 0)
    ZeroDivisionError('division by zero')
    """
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, but nothing was raised")


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a tensor of any dtype from random bits, NaNs with odd payloads among them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256  # other bytes are no bools
    flat = torch.randint(0, high, (count,), dtype=torch.uint8)
    integers = flat.view(bits_of(dtype)) if count else torch.empty(0, dtype=bits_of(dtype))
    return integers.view(dtype).view(shape)


def tensors_of_every_kind() -> Iterator[tuple[str, torch.Tensor]]:
    """Make named tensors of every dtype, layout and alignment that must arrive unchanged."""
    for dtype in CODE_OF_DTYPE:
        yield f"{dtype}", random_bits(dtype, 3, 5)
        yield f"{dtype}, 0-dim", random_bits(dtype)
        yield f"{dtype}, empty", random_bits(dtype, 0, 4)
        yield f"{dtype}, transposed", random_bits(dtype, 3, 5).t()
        yield f"{dtype}, with gaps", random_bits(dtype, 6, 8)[::2, 1:7:3]
    base = torch.randn(4, 3, 6, 5)
    yield "channels_last", base.to(memory_format=torch.channels_last)
    yield "permuted", base.permute(2, 0, 3, 1)
    yield "expanded", torch.randn(4, 1, 3).expand(4, 7, 3)
    yield "expanded scalar", torch.tensor(3.5).expand(1000, 1000)
    yield "overlapping windows", torch.randn(10).unfold(0, 4, 2)
    yield "size-1 dimension of odd stride", torch.randn(8).as_strided((1, 8), (1000, 1))
    yield "eight dimensions", torch.randn(1, 2, 1, 2, 1, 2, 1, 2)
    yield "misaligned by one element", torch.randn(65)[1:]
    yield (
        "misaligned within an element",
        torch.frombuffer(bytearray(range(101)), dtype=torch.float32, count=25, offset=1),
    )
    yield "conjugate view", torch.randn(5, dtype=torch.complex64).conj()
    yield "negative view", torch.randn(5, dtype=torch.complex64).conj().imag
    yield "requires a gradient", torch.randn(3, requires_grad=True)
    yield "view that requires a gradient", torch.randn(3, 4, requires_grad=True).t()


def large_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Make named tensors of some hundred KiB, of every dtype and of some layouts and alignments."""
    for dtype in CODE_OF_DTYPE:
        yield f"{dtype}", random_bits(dtype, 200, 1000)
    yield "transposed", torch.randn(300, 200).t()
    yield "channels_last", torch.randn(4, 30, 40, 50).to(memory_format=torch.channels_last)
    yield "with gaps", torch.randn(600, 400)[::2, 1::3]
    yield "misaligned by one element", torch.randn(100_001)[1:]
    yield "misaligned within an element", torch.frombuffer(bytearray(400_001), dtype=torch.float32, offset=1)


class ChannelConformance:
    """Tests of one kind of channel."""

    def pair(self, options: ChannelOptions) -> AbstractContextManager[tuple[Channel, Channel]]:
        """Make two connected ends with these options, and take them away afterwards."""
        raise NotImplementedError

    def test_every_kind_of_tensor_arrives_with_its_bits_strides_and_alignment(self) -> None:
        """The receiver's tensor cannot be told from the sender's."""
        with self.pair(ChannelOptions()) as (left, right):
            for name, tensor in tensors_of_every_kind():
                left.send(Frame.of_tensor(FrameKind.FORWARD, tensor), timeout_s=WAIT_S)
                check_same(name, right.receive(timeout_s=WAIT_S).tensor(), tensor)

    def test_large_tensors_arrive_with_their_bits_strides_and_alignment(self) -> None:
        """However a channel brings what is worth a way of its own."""
        with self.pair(ChannelOptions()) as (left, right):
            for name, tensor in large_tensors():
                for kind in (FrameKind.FORWARD, FrameKind.STATE):
                    left.send(Frame.of_tensor(kind, tensor), timeout_s=WAIT_S)
                    check_same(name, right.receive(timeout_s=WAIT_S).tensor(), tensor)

    def test_received_tensors_outlive_later_ones_and_the_channel(self) -> None:
        """A receiver may keep what it got for as long as it likes."""
        sent = [torch.full((50_000,), float(number)) for number in range(20)]
        with self.pair(ChannelOptions(send_queue_bytes=1 << 20)) as (left, right):
            kept = []
            for tensor in sent:
                left.send(Frame.of_tensor(FrameKind.FORWARD, tensor), timeout_s=WAIT_S)
                kept.append(right.receive(timeout_s=WAIT_S).tensor())
                if len(kept) % 3 == 0:
                    kept[-1] = kept[-1].clone()  # what it got is free again
        for found, tensor in zip(kept, sent, strict=True):
            check_same("kept", found, tensor)

    def test_header_arrives_as_it_was_sent(self) -> None:
        """Every field has its place."""
        flags = FrameFlags.WANTS_GRADIENT | FrameFlags.LAST_LEAF
        names = {"generation": 7, "microbatch": 3, "pass_index": 1 << 40, "value": 9, "stage": 2, "leaf": 1}
        frame = Frame.of_tensor(FrameKind.BACKWARD, torch.ones(2), flags=flags, num_leaves=2, run=1 << 63, **names)
        with self.pair(ChannelOptions()) as (left, right):
            left.send(frame, timeout_s=WAIT_S)
            assert right.receive(timeout_s=WAIT_S).header == frame.header

    def test_messages_and_plain_bytes(self) -> None:
        """Payloads need not be tensors."""
        with self.pair(ChannelOptions()) as (left, right):
            left.send(Frame.of_message({"op": "hello", "list": [1, None, "ü"]}), timeout_s=WAIT_S)
            left.send(Frame.of_bytes(FrameKind.PING), timeout_s=WAIT_S)
            left.send(Frame.of_bytes(FrameKind.STATE, bytes(range(256)) * 400), timeout_s=WAIT_S)
            assert right.receive(timeout_s=WAIT_S).message() == {"op": "hello", "list": [1, None, "ü"]}
            assert right.receive(timeout_s=WAIT_S).payload == b""
            assert right.receive(timeout_s=WAIT_S).payload == bytes(range(256)) * 400

    def test_received_memory_is_its_own(self) -> None:
        """Changing what was received changes nothing at the sender's."""
        tensor = torch.zeros(3)
        with self.pair(ChannelOptions()) as (left, right):
            left.send(Frame.of_tensor(FrameKind.FORWARD, tensor), timeout_s=WAIT_S)
            right.receive(timeout_s=WAIT_S).tensor().fill_(1)
        assert tensor.tolist() == [0, 0, 0]

    def test_300_mb_tensor(self) -> None:
        """Large tensors need no setting."""
        tensor = torch.arange(75_000_000, dtype=torch.int32)
        with self.pair(ChannelOptions()) as (left, right), ThreadPoolExecutor(1) as pool:
            sending = pool.submit(left.send, Frame.of_tensor(FrameKind.STATE, tensor), timeout_s=WAIT_S)
            assert torch.equal(right.receive(timeout_s=WAIT_S).tensor(), tensor)
            sending.result(WAIT_S)

    def test_64_microbatches_in_flight_both_ways(self) -> None:
        """Both ends may send all they have before either receives; order is kept, so names tell them apart."""
        with self.pair(ChannelOptions()) as (left, right):
            for index in reversed(range(64)):
                tensor = torch.full((40_000,), float(index))
                left.send(Frame.of_tensor(FrameKind.FORWARD, tensor, microbatch=index), timeout_s=WAIT_S)
                right.send(Frame.of_tensor(FrameKind.BACKWARD, -tensor, microbatch=index), timeout_s=WAIT_S)
            for channel, sign in ((right, 1), (left, -1)):
                frames = [channel.receive(timeout_s=WAIT_S) for _ in range(64)]
                assert [frame.header.microbatch for frame in frames] == list(reversed(range(64)))
                assert all(bool((frame.tensor() == sign * frame.header.microbatch).all()) for frame in frames)

    def test_full_queue_holds_the_sender_back(self) -> None:
        """Memory is bounded, the deadline is kept, and nothing is lost."""
        tensor, options = torch.zeros(1 << 20, dtype=torch.uint8), ChannelOptions(send_queue_bytes=2 << 20)
        with self.pair(options) as (left, right):
            sent = 0
            while sent < 256:  # kernels buffer some too
                try:
                    left.send(Frame.of_tensor(FrameKind.FORWARD, tensor, microbatch=sent), timeout_s=SOON_S)
                except DeadlineError:
                    break
                sent += 1
            assert 1 <= sent < 128
            received = [right.receive(timeout_s=WAIT_S).header.microbatch for _ in range(sent)]
            assert received == list(range(sent))
            left.send(Frame.of_tensor(FrameKind.FORWARD, tensor, microbatch=sent), timeout_s=WAIT_S)
            assert right.receive(timeout_s=WAIT_S).header.microbatch == sent

    def test_deadline_leaves_the_channel_usable(self) -> None:
        """Nothing came: an error in time, and the next frame is received as if nothing had been."""
        with self.pair(ChannelOptions()) as (left, right):
            start = time.monotonic()
            expect_error(DeadlineError, lambda: right.receive(timeout_s=SOON_S))
            expect_error(DeadlineError, lambda: right.receive(timeout_s=0))
            assert SOON_S <= time.monotonic() - start < SOON_S + 2
            left.send(Frame.of_message({"n": 1}), timeout_s=WAIT_S)
            assert right.receive(timeout_s=WAIT_S).message() == {"n": 1}
            assert not left.closed
            assert not right.closed

    def test_waits_without_end_are_refused(self) -> None:
        """No wait without a deadline."""
        with self.pair(ChannelOptions()) as (left, _):
            expect_error(ValueError, lambda: left.receive(timeout_s=float("inf")))
            expect_error(ValueError, lambda: left.receive(timeout_s=-1))

    def test_close_delivers_what_was_sent_before(self) -> None:
        """The last words arrive; then both sides know that it is over."""
        with self.pair(ChannelOptions()) as (left, right):
            left.send(Frame.of_tensor(FrameKind.OUTPUT, torch.ones(500_000)), timeout_s=WAIT_S)
            left.send(Frame.of_message({"last": "words"}), timeout_s=WAIT_S)
            with ThreadPoolExecutor(1) as pool:
                closing = pool.submit(left.close, timeout_s=WAIT_S)
                assert right.receive(timeout_s=WAIT_S).tensor().sum() == 500_000
                assert right.receive(timeout_s=WAIT_S).message() == {"last": "words"}
                closing.result(WAIT_S)
            expect_error(PeerClosedError, lambda: right.receive(timeout_s=WAIT_S))
            expect_error(PeerClosedError, lambda: right.send(Frame.of_bytes(FrameKind.PING), timeout_s=WAIT_S))
            expect_error(PeerClosedError, lambda: left.send(Frame.of_bytes(FrameKind.PING), timeout_s=WAIT_S))
            expect_error(PeerClosedError, lambda: left.receive(timeout_s=WAIT_S))
            assert left.closed
            assert right.closed
            left.close()

    def test_close_wakes_a_waiting_receiver(self) -> None:
        """A thread that aborts a run need not wait for the one that receives."""
        with self.pair(ChannelOptions()) as (left, _):
            waiting = threading.Event()

            def receive() -> Frame:
                waiting.set()
                return left.receive(timeout_s=WAIT_S)

            with ThreadPoolExecutor(1) as pool:
                receiving = pool.submit(receive)
                waiting.wait(WAIT_S)
                left.close()
                expect_error(PeerClosedError, lambda: receiving.result(WAIT_S))

    def test_errors_are_fresh_each_time(self) -> None:
        """Two threads never share one exception's traceback."""
        with self.pair(ChannelOptions()) as (left, right):
            left.close()
            first = expect_error(PeerClosedError, lambda: right.receive(timeout_s=WAIT_S))
            second = expect_error(PeerClosedError, lambda: right.receive(timeout_s=WAIT_S))
            assert first is not second
            assert str(first) == str(second)

    def test_connection_dropped_between_frames(self) -> None:
        """What was complete arrives; then the receiver is told."""
        with self.pair(ChannelOptions()) as (left, right):
            faulty = FaultyChannel(left, drop_after=1)
            faulty.send(Frame.of_message({"n": 0}), timeout_s=WAIT_S)
            faulty.send(Frame.of_message({"n": 1}), timeout_s=WAIT_S)
            assert right.receive(timeout_s=WAIT_S).message() == {"n": 0}
            expect_error(PeerClosedError, lambda: right.receive(timeout_s=WAIT_S))

    def test_connection_dropped_within_a_frame(self) -> None:
        """Half a tensor is never delivered; the error says how far it came."""
        with self.pair(ChannelOptions()) as (left, right):
            faulty = FaultyChannel(left, truncate_after=0)
            faulty.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(10_000), value=5), timeout_s=WAIT_S)
            error = expect_error(PeerClosedError, lambda: right.receive(timeout_s=WAIT_S))
            assert "FORWARD (pass 0, micro-batch 0, value 5" in str(error)

    def test_limits_hold_before_memory_is_taken(self) -> None:
        """A frame beyond the limits ends the channel, for both sides."""
        with self.pair(ChannelOptions(limits=FrameLimits(max_payload_bytes=1000, max_control_bytes=100))) as (
            left,
            right,
        ):
            left.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(250)), timeout_s=WAIT_S)
            assert right.receive(timeout_s=WAIT_S).tensor().numel() == 250
            left.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(251)), timeout_s=WAIT_S)
            error = expect_error(FrameError, lambda: right.receive(timeout_s=WAIT_S))
            assert "1004 bytes, more than the limit of 1000" in str(error)
            assert right.closed
            expect_error(PeerClosedError, lambda: left.receive(timeout_s=WAIT_S))

    def test_unexpected_frames_are_refused_by_the_plan(self) -> None:
        """The hook sees every header before memory is taken for it."""

        def only_two_rows(header: FrameHeader) -> None:
            if header.shape[0] != 2:
                raise FrameError(f"value {header.value}: expected 2 rows, got {header.shape[0]}")

        with self.pair(ChannelOptions()) as (left, right):
            right.expect = only_two_rows
            left.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(2, 3)), timeout_s=WAIT_S)
            assert right.receive(timeout_s=WAIT_S).tensor().shape == (2, 3)
            left.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(3, 3), value=4), timeout_s=WAIT_S)
            error = expect_error(TransportError, lambda: right.receive(timeout_s=WAIT_S))
            assert str(error) == "value 4: expected 2 rows, got 3"

    def test_statistics_count_frames_and_bytes(self) -> None:
        """Headers included, the same on both sides."""
        with self.pair(ChannelOptions()) as (left, right):
            for _ in range(3):
                left.send(Frame.of_tensor(FrameKind.FORWARD, torch.ones(8)), timeout_s=WAIT_S)
                right.receive(timeout_s=WAIT_S)
            assert (left.stats.frames_sent, left.stats.bytes_sent) == (3, 3 * (192 + 32))
            assert (right.stats.frames_received, right.stats.bytes_received) == (3, 3 * (192 + 32))


def check_same(name: str, found: torch.Tensor, sent: torch.Tensor) -> None:
    """Compare everything that can change a bit of a later result.

    Raises:
        AssertionError: Something differs; it says which tensor and what.
    """
    resolved = sent.detach().resolve_conj().resolve_neg()
    facts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in (found, resolved)]
    assert facts[0] == facts[1], f"{name}: {facts[0]} is not {facts[1]}"
    if resolved is sent and sent.numel():
        assert found.data_ptr() % 64 == sent.data_ptr() % 64, f"{name}: alignment {found.data_ptr() % 64}"
    bits = [_as_integers(tensor) for tensor in (found, resolved)]
    assert torch.equal(*bits), f"{name}: bits differ"
    assert not found.requires_grad


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Look at the bits, which are equal where NaNs are not."""
    parts = torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor
    return parts.view(torch.int64 if parts.dtype == torch.float64 else bits_of(parts.dtype))

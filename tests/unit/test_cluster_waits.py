"""Waits that another thread can end, and messages between which others come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchslicer.cluster.control import Control
from torchslicer.cluster.inbox import Inbox
from torchslicer.cluster.links import Links, RunKey
from torchslicer.cluster.mailbox import Mailbox
from torchslicer.cluster.members import Member
from torchslicer.cluster.messages import Abort, Failed, Heartbeat, Hello, Ready, State, Stepped
from torchslicer.errors import DeadlineError, PeerClosedError, RunError, StageError, WorkerFailureError
from torchslicer.transport.base import Channel, ChannelOptions
from torchslicer.transport.frame import Frame, FrameKind
from torchslicer.transport.memory import memory_pair

KEY = (FrameKind.FORWARD, 1, 0, 0, 0)


def soon(action: Any, *arguments: Any) -> threading.Timer:
    timer = threading.Timer(0.05, action, arguments)
    timer.start()
    return timer


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = memory_pair(options=ChannelOptions(send_queue_bytes=1 << 10))
    yield pair
    for channel in pair:
        channel.close(timeout_s=0)


def member(control: Any, name: str = "a", stage: int = 0) -> Member:
    hello = Hello(protocol=1, version="1", torch_version="2", node=name, host="h", device="cpu", cores=1, endpoints=[])
    return Member(hello, control, stage=stage)


# Mailbox


def test_a_failure_ends_a_wait() -> None:
    mailbox = Mailbox(60)
    timer = soon(mailbox.fail, RunError("over"))
    with pytest.raises(RunError, match="over"):
        mailbox.take([KEY])
    timer.join()
    mailbox.put(KEY, 1)
    assert len(mailbox) == 0, "what comes for a run that is over is not kept"


def test_a_wait_in_which_nothing_comes_ends() -> None:
    mailbox = Mailbox(0.05)
    with pytest.raises(DeadlineError, match=r"waited 0 s for an activation of stage 0, micro-batch 0 \(value 0\)"):
        mailbox.take([KEY])
    assert mailbox.waits_for == ""


# Links


def test_a_failure_ends_a_send_that_waits_for_room(ends: tuple[Channel, Channel]) -> None:
    mailbox = Mailbox(60)
    links = Links(RunKey(0, 1), mailbox, on_lost=lambda rank, error: None, send_timeout_s=60)
    links.add(1, ends[0])
    frame = Frame.of_tensor(FrameKind.FORWARD, torch.zeros(4096), generation=1)
    timer = soon(mailbox.fail, RunError("over"))
    started = time.monotonic()
    with pytest.raises(RunError, match="over"):
        links.send(1, [frame] * 10)
    assert time.monotonic() - started < 2
    timer.join()
    links.close(timeout_s=0)


def test_a_channel_that_comes_too_late_is_closed(ends: tuple[Channel, Channel]) -> None:
    links = Links(RunKey(0, 1), Mailbox(60), on_lost=lambda rank, error: None, send_timeout_s=60)
    links.close()
    with pytest.raises(PeerClosedError, match="the run is over"):
        links.add(1, ends[0])
    assert ends[0].closed


def test_an_interrupted_send_ends_the_channel(ends: tuple[Channel, Channel]) -> None:
    links = Links(RunKey(0, 1), Mailbox(60), on_lost=lambda rank, error: None, send_timeout_s=60)
    links.add(1, ends[0])

    def interrupted() -> Iterator[Frame]:
        yield Frame.of_tensor(FrameKind.FORWARD, torch.zeros(1), generation=1)

    send = ends[0].send

    def breaking(frame: Frame, *, timeout_s: float) -> None:
        send(frame, timeout_s=timeout_s)
        raise KeyboardInterrupt

    ends[0].send = breaking  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        links.send(1, interrupted())
    assert ends[0].closed
    links.close(timeout_s=0)


# Control


def test_heartbeats_come_between_tensors(ends: tuple[Channel, Channel]) -> None:
    here, there = Control(ends[0]), Control(ends[1])
    here.send(State(generation=1, tensors=["a", "b"]))
    here._send(Frame.of_tensor(FrameKind.STATE, torch.ones(2), value=0), 1)
    here.beat(Heartbeat())
    here._send(Frame.of_tensor(FrameKind.STATE, torch.zeros(2), value=1), 1)
    message = there.receive(timeout_s=1)
    tensors = there.receive_tensors(len(message.tensors))
    assert tensors is not None
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 0]]


def test_tensors_that_stop_half_way(ends: tuple[Channel, Channel]) -> None:
    here, there = Control(ends[0]), Control(ends[1])
    here._send(Frame.of_tensor(FrameKind.STATE, torch.ones(2), value=0), 1)
    here.send(Abort(generation=1, reason="Ctrl-C"))
    assert there.receive_tensors(2) is None
    assert there.receive(timeout_s=1) == Abort(generation=1, reason="Ctrl-C")


def test_a_heartbeat_waits_for_nobody(ends: tuple[Channel, Channel]) -> None:
    control = Control(ends[0])
    started = time.monotonic()
    with control._sending:
        control.beat(Heartbeat())  # somebody else is sending
    control._send(Frame.of_tensor(FrameKind.STATE, torch.zeros(4096)), 1)
    control.beat(Heartbeat())  # the queue is full
    assert time.monotonic() - started < 1


# Inbox


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(threading.Condition())


def failed(*, lost_peer: int | None = None, generation: int = 1) -> Failed:
    return Failed(generation=generation, stage=0, error="StageError", message="boom", traceback="", lost_peer=lost_peer)


def begin(inbox: Inbox, ends: tuple[Channel, Channel]) -> tuple[Member, Member]:
    members = member(Control(ends[0]), "a"), member(Control(ends[1]), "b")
    inbox.begin(1, members, on_trouble=lambda: None)
    return members


def test_the_cause_counts_not_what_follows_from_it(inbox: Inbox, ends: tuple[Channel, Channel]) -> None:
    a, b = begin(inbox, ends)
    inbox.put(a, failed(lost_peer=1), [])
    timer = soon(inbox.put, b, failed(), [])
    with pytest.raises(StageError, match="stage 1 on worker 'b'"):
        inbox.collect(Ready, [a, b], timeout_s=5, where=lambda message: True)
    timer.join()


def test_what_belongs_to_another_run_is_dropped(inbox: Inbox, ends: tuple[Channel, Channel]) -> None:
    a, _ = begin(inbox, ends)
    inbox.put(a, failed(generation=0), [])
    inbox.put(a, Stepped(generation=1, step=3), [])
    assert len(inbox) == 0


def test_the_end_of_a_step_is_waited_for(inbox: Inbox, ends: tuple[Channel, Channel]) -> None:
    a, b = begin(inbox, ends)
    inbox.wait_stepped(b, 3, timeout_s=0)  # nobody has stepped yet: the first step of a run
    inbox.put(a, Stepped(generation=1, step=3), [])
    started = time.monotonic()
    inbox.wait_stepped(b, 3, timeout_s=0.1)  # another one has
    assert time.monotonic() - started >= 0.1
    inbox.put(b, Stepped(generation=1, step=3), [])
    started = time.monotonic()
    inbox.wait_stepped(b, 3, timeout_s=60)
    inbox.put(a, failed(), [])
    inbox.wait_stepped(b, 4, timeout_s=60)  # a failure is not waited out
    assert time.monotonic() - started < 30


def test_a_stall_names_who_computes(inbox: Inbox, ends: tuple[Channel, Channel]) -> None:
    a, b = begin(inbox, ends)
    a.doing, b.doing = "waits for a gradient", "computes: step 3 (for 9 s)"
    with pytest.raises(WorkerFailureError, match=r"^stage 1 on worker 'b' .*: nothing came from any worker for 0.05 s"):
        inbox.collect(Ready, [a, b], timeout_s=0.05, where=lambda message: True)

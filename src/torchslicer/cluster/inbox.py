"""What the workers of a run have said and nobody has looked at yet, and what has gone wrong in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchslicer.cluster.members import Member, loss_of, remote_error, stall_of
from torchslicer.cluster.messages import Failed, Message, Stepped

_ROOT_CAUSE_S = 2.0

Said = tuple[Member, Any, list[torch.Tensor]]
"""Who said it, the message, and the tensors that came with it."""


class Inbox:
    """Messages of one run at a time; those of another generation are dropped.

    Args:
        condition: Notified when a message is put in, and when a member is lost.
    """

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._inbox: list[Said] = []
        self._arrivals = 0
        self._stepped: dict[str, int] = {}
        self._generation = -1
        self._running: list[Member] = []
        self._on_trouble: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._inbox)

    def put(self, member: Member, message: Any, tensors: list[torch.Tensor]) -> None:
        """Take a message in; whoever holds the lock may do that."""
        if getattr(message, "generation", None) == self._generation:
            self._arrivals += 1
            if isinstance(message, Stepped):
                self._stepped[member.node] = message.step
            else:
                self._inbox.append((member, message, tensors))

    def trouble(self, member: Member) -> None:
        """Wake whoever waits for data and not for messages: *member* has failed or is lost."""
        with self._condition:
            call = self._on_trouble if member in self._running else None
        if call is not None:
            call()

    def begin(self, generation: int, members: Sequence[Member], *, on_trouble: Callable[[], None]) -> None:
        """From now on hear of the run *generation* only, in which ``members[i]`` has stage ``i``.

        *on_trouble* is called, by any thread, when one of them fails or is lost.
        """
        with self._condition:
            self._generation, self._running, self._on_trouble = generation, list(members), on_trouble
            self._inbox.clear()
            self._stepped.clear()
            for stage, member in enumerate(members):
                member.busy, member.stage = generation, stage

    def end(self) -> None:
        """Throw away what was said of the run; members stay busy until they say that they have let go."""
        with self._condition:
            self._on_trouble = None
            self._generation = -1
            self._inbox.clear()
            self._running = []

    def collect(
        self, kind: type[Message], members: Sequence[Member], *, timeout_s: float, where: Callable[[Any], bool]
    ) -> dict[str, tuple[Any, list[torch.Tensor]]]:
        """Return from each of *members* its message of *kind* for which *where* holds.

        Raises:
            WorkerFailureError: A member of the run died or went silent, or nothing at all came for *timeout_s*.
            StageError: A stage raised.
        """
        wanted = {member.node for member in members}
        found: dict[str, tuple[Any, list[torch.Tensor]]] = {}
        with self._condition:
            arrivals, deadline = self._arrivals, time.monotonic() + timeout_s
            while True:
                self._sort_inbox(kind, wanted, found, where)
                if len(found) == len(wanted):
                    return found
                self._raise_failures()
                if self._arrivals != arrivals:
                    arrivals, deadline = self._arrivals, time.monotonic() + timeout_s
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [member for member in members if member.node not in found]
                    raise stall_of(self._running, missing, kind.__name__, timeout_s)
                self._condition.wait(left)

    def wait_through(self, members: Sequence[Member], step: int, *, timeout_s: float) -> None:
        """Wait until *members* are through with *step*.

        Raises:
            WorkerFailureError: A member of the run died or went silent, or they are not within *timeout_s*.
            StageError: A stage raised.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while missing := [member for member in members if self._stepped.get(member.node, -1) < step]:
                self._raise_failures()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise stall_of(self._running, missing, Stepped.__name__, timeout_s)
                self._condition.wait(left)

    def wait_stepped(self, member: Member, step: int, *, timeout_s: float) -> None:
        """Wait until *member* is through with *step*, or anything else has been said, or it is known to be lost."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    not self._stepped
                    or self._stepped.get(member.node, -1) >= step
                    or bool(self._inbox)
                    or any(running.lost is not None for running in self._running)
                ),
                timeout_s,
            )

    def _sort_inbox(
        self, kind: type[Message], wanted: set[str], found: dict[str, Any], where: Callable[[Any], bool]
    ) -> None:
        rest: list[Said] = []
        for member, message, tensors in self._inbox:
            if isinstance(message, kind) and member.node in wanted and member.node not in found and where(message):
                found[member.node] = (message, tensors)
            else:
                rest.append((member, message, tensors))
        self._inbox = rest

    def _failures(self) -> tuple[list[tuple[Member, Failed]], list[tuple[Member, Failed]], list[Member]]:
        """Return what members failed with by themselves, what they failed with for want of another, and who is gone."""
        failed = [(member, message) for member, message, _ in self._inbox if isinstance(message, Failed)]
        own = [(member, message) for member, message in failed if message.lost_peer is None]
        passive = [(member, message) for member, message in failed if message.lost_peer is not None]
        return own, passive, [member for member in self._running if member.lost is not None]

    def _raise_failures(self, *, certain: bool = False) -> None:
        """Raise what ended the run, if anything did.

        Where a member only tells that it lost another, or the caller is *certain* that something is wrong, wait a
        moment for the cause: it may be on its way. (Waiting gives the lock free.)
        """
        deadline = time.monotonic() + _ROOT_CAUSE_S
        while True:
            own, passive, lost = self._failures()
            if own:
                raise remote_error(*own[0])
            if lost:
                raise loss_of(lost[0])
            left = deadline - time.monotonic()
            if left <= 0 and passive:
                raise remote_error(*passive[0])
            if left <= 0 or not (passive or certain):
                return
            self._condition.wait(left)

    def raise_cause(self) -> None:
        """Raise what ended the run; return after a moment if nobody says."""
        with self._condition:
            self._raise_failures(certain=True)

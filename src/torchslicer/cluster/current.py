"""The run that a worker's computing thread is in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchslicer.cluster.assignment import Assignment
from torchslicer.cluster.heap import return_freed_memory
from torchslicer.cluster.messages import Ready
from torchslicer.cluster.part import decode_part
from torchslicer.cluster.session import Part, RankSession, Tell
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.pipeline.rng import preserved_rng

logger = logging.getLogger("torchslicer.worker")


@dataclass
class CurrentRun:
    """What the worker holds of it; nothing between two runs."""

    assignment: Assignment | None = None
    session: RankSession | None = None

    def begin(self, tensors: Sequence[torch.Tensor], *, device: torch.device, allowed: Allowed, tell: Tell) -> None:
        """Make the part that was assigned, link it to its peers, and say that it is ready.

        Raises:
            ShippingError: The part cannot be made here.
            PeerLostError: A peer cannot be reached, or did not come.
        """
        assignment = self.assignment
        assert assignment is not None
        message = assignment.message
        torch.set_num_threads(max(message.threads, 1))
        named = dict(zip(message.tensors, tensors, strict=True))
        with preserved_rng():  # what makes a part may draw; in the driver's process, from its numbers
            part = decode_part(message.description, named, device=device, allowed=allowed)
        logger.info("run %s: %s, %s", message.run_id, _held(part), _threads(torch.get_num_threads()))
        assignment.link()
        self.session = RankSession(part, assignment.links, tell=tell, ask=assignment.ask_scale)
        tell(Ready(generation=assignment.generation, threads=torch.get_num_threads()))
        assignment.now("is ready")

    def handle(self, message: Any) -> None:
        """Do what a message says."""
        assert self.assignment is not None
        assert self.session is not None
        self.assignment.now(f"computes: {_words(message)}")
        self.session.handle(message)
        self.assignment.now("has nothing to do")

    def close(self) -> None:
        """Forget the run."""
        session, assignment = self.session, self.assignment
        self.session = self.assignment = None
        for part in (session, assignment):
            if part is not None:
                part.close()
        return_freed_memory()


def _words(message: Any) -> str:
    step = getattr(message, "step", None)
    return type(message).__name__.lower() + ("" if step is None else f" {step}")


def _held(part: Part) -> str:
    """Say for the log which stages of how many a part has, and what is in them, as the plan names it."""
    units = [unit.name for unit, stage in zip(part.graph.units, part.stage_of, strict=True) if stage in part.held]
    held = " and ".join(f"stage {stage}" for stage in part.held)
    several = f"units {units[0]}..{units[-1]}" if len(units) > 1 else f"unit {units[0]}"
    return f"holds {held} of {part.stage_of[-1] + 1}, counted from 0 ({several})"


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"

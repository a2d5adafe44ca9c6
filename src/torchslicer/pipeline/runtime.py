"""The interpreter of a rank's actions. Every schedule and every mode runs through this loop.

A step of a rank::

    actions   0F0 0F1 0B0 0B1      walked in order
                 |       |
                 v       v
    stage     forward  backward
                 |       |
                 v       v
    mailbox   packets  gradients    what stages hand to each other

Local mode is one rank that holds every stage; there the mailbox is all the transport there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchslicer.pipeline.boundary import Gradients, Packet
from torchslicer.pipeline.stage import Result, Route, Stage, Work
from torchslicer.schedule import Action, ActionKind


@dataclass
class Mailbox:
    """Packets and gradients that wait for the stage that will use them, by (stage, micro-batch) and value."""

    packets: dict[tuple[int, int], dict[int, Packet]] = field(default_factory=dict)
    gradients: dict[tuple[int, int], dict[int, Gradients]] = field(default_factory=dict)

    def put_packet(self, stage: int, microbatch: int, node: int, packet: Packet) -> None:
        """Leave a value for *stage*."""
        self.packets.setdefault((stage, microbatch), {})[node] = packet

    def put_gradients(self, stage: int, microbatch: int, node: int, gradients: Gradients) -> None:
        """Leave the gradient of a value for *stage*."""
        self.gradients.setdefault((stage, microbatch), {})[node] = gradients

    def clear(self) -> None:
        """Throw everything away."""
        self.packets.clear()
        self.gradients.clear()


@dataclass
class StepOutcome:
    """What the last stage said about each micro-batch."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    aux_losses: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def add(self, microbatch: int, result: Result) -> None:
        """Note the loss and the output, where the stage gave any."""
        if result.loss is not None:
            self.losses[microbatch] = result.loss
        self.aux_losses.setdefault(microbatch, []).extend(result.aux_losses)
        if result.output is not None:
            self.outputs[microbatch] = result.output


class Runtime:
    """Walks the actions of one rank.

    Args:
        stages: The stages that the rank holds, by number.
        recompute: ``"never"``, ``"except_last"`` (micro-batch) or ``"always"``.
    """

    def __init__(self, stages: Mapping[int, Stage], *, recompute: str = "never") -> None:
        self.stages = stages
        self.recompute = recompute
        self.mailbox = Mailbox()
        self._routes: dict[tuple[int, int], Route] = {
            (stage.index, route.node): route for stage in stages.values() for route in (*stage.imports, *stage.exports)
        }

    def run(self, actions: Iterable[Action], works: Sequence[Work], *, training: bool = True) -> StepOutcome:
        """Walk *actions* for the micro-batches *works*; on failure nothing stays in flight.

        Raises:
            StageError: A stage raised.
        """
        outcome = StepOutcome()
        try:
            for action in actions:
                if action.kind is ActionKind.F:
                    self._forward(action, works, outcome, training=training)
                elif action.kind is ActionKind.B:
                    self._backward(action)
        except BaseException:
            self.forget()
            raise
        return outcome

    def forget(self) -> None:
        """Drop everything in flight."""
        self.mailbox.clear()
        for stage in self.stages.values():
            stage.forget()

    def _forward(self, action: Action, works: Sequence[Work], outcome: StepOutcome, *, training: bool) -> None:
        stage, microbatch = self.stages[action.stage], _microbatch(action)
        packets = self.mailbox.packets.pop((stage.index, microbatch), {})
        work = works[microbatch]
        if training:
            result = stage.forward(work, packets, recompute=self._recomputes(microbatch, len(works)))
        else:
            result = stage.evaluate(work, packets)
        outcome.add(microbatch, result)
        for node, packet in result.packets.items():
            for consumer in self._routes[stage.index, node].consumers:
                self.mailbox.put_packet(consumer, microbatch, node, packet)

    def _recomputes(self, microbatch: int, num_microbatches: int) -> bool:
        if self.recompute == "except_last":
            return microbatch != num_microbatches - 1
        return self.recompute == "always"

    def _backward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], _microbatch(action)
        received = self.mailbox.gradients.pop((stage.index, microbatch), {})
        for node, gradients in stage.backward(microbatch, received).items():
            previous = self._routes[stage.index, node].previous(stage.index)
            self.mailbox.put_gradients(previous, microbatch, node, gradients)


def _microbatch(action: Action) -> int:
    if action.microbatch is None:
        raise ValueError(f"action {action} has no micro-batch")
    return action.microbatch

"""The interpreter of a rank's actions. Every schedule and every mode runs through this loop.

A step of a rank::

    actions   0F0 0F1 0B0 0B1      walked in order
                 |       |
                 v       v
    stage     forward  backward
                 |       |
                 v       v
    exchange  packets  gradients   what stages hand to each other

Local mode is one rank that holds every stage; there the exchange is a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torchslicer.pipeline.exchange import Exchange, LocalExchange
from torchslicer.pipeline.stage import Result, Route, Stage, Work
from torchslicer.schedule import Action, ActionKind

Report = Callable[[int, Result], None]
"""Called with the micro-batch and the result of every forward pass."""


class Runtime:
    """Walks the actions of one rank.

    Args:
        stages: The stages that the rank holds, by number.
        exchange: How values reach other stages; by default all stages are in this rank.
        recompute: ``"never"``, ``"except_last"`` (micro-batch) or ``"always"``.
    """

    def __init__(
        self, stages: Mapping[int, Stage], *, exchange: Exchange | None = None, recompute: str = "never"
    ) -> None:
        self.stages = stages
        self.exchange: Exchange = LocalExchange() if exchange is None else exchange
        self.recompute = recompute
        self._awaited: dict[int, tuple[Route, ...]] = {
            index: (*stage.exports, *(route for route in stage.imports if route.next(index) is not None))
            for index, stage in stages.items()
        }

    def run(self, actions: Iterable[Action], works: Sequence[Work], report: Report, *, training: bool = True) -> None:
        """Walk *actions* for the micro-batches *works*; on failure nothing stays in flight.

        Raises:
            StageError: A stage raised.
        """
        try:
            for action in actions:
                if action.kind is ActionKind.F:
                    self._forward(action, works, report, training=training)
                elif action.kind is ActionKind.B:
                    self._backward(action)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop everything in flight."""
        self.exchange.clear()
        for stage in self.stages.values():
            stage.forget()

    def _forward(self, action: Action, works: Sequence[Work], report: Report, *, training: bool) -> None:
        stage, microbatch = self.stages[action.stage], _microbatch(action)
        packets = self.exchange.take_packets((stage.index, microbatch), stage.imports)
        work = works[microbatch]
        if training:
            result = stage.forward(work, packets, recompute=self._recomputes(microbatch, len(works)))
        else:
            result = stage.evaluate(work, packets)
        for route in stage.exports:
            self.exchange.send_packet(route, microbatch, result.packets[route.node])
        report(microbatch, result)

    def _recomputes(self, microbatch: int, num_microbatches: int) -> bool:
        if self.recompute == "except_last":
            return microbatch != num_microbatches - 1
        return self.recompute == "always"

    def _backward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], _microbatch(action)
        received = self.exchange.take_gradients((stage.index, microbatch), self._awaited[stage.index])
        gradients = stage.backward(microbatch, received)
        for route in stage.imports:
            self.exchange.send_gradients(route.previous(stage.index), route, microbatch, gradients[route.node])


def _microbatch(action: Action) -> int:
    if action.microbatch is None:
        raise ValueError(f"action {action} has no micro-batch")
    return action.microbatch

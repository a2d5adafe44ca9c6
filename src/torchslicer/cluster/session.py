"""A rank's part in one run: it does what the coordinator's messages say, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchslicer.cluster.links import COORDINATOR, Links, RankExchange
from torchslicer.cluster.messages import (
    BatchInfo,
    EndEpoch,
    Evaluate,
    Gather,
    Losses,
    Message,
    Norms,
    Number,
    Scale,
    Settle,
    Settled,
    State,
    Step,
    Stepped,
)
from torchslicer.cluster.packing import packet_frames
from torchslicer.errors import ProtocolError, StageError
from torchslicer.graph.model import ModelGraph
from torchslicer.graph.modes import evaluation_mode
from torchslicer.pipeline.boundary import Export
from torchslicer.pipeline.interpreter import current_buffer
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.rank import Rank
from torchslicer.pipeline.rng import preserved_rng
from torchslicer.pipeline.runtime import Runtime
from torchslicer.pipeline.stage import Result, Route, Stage, StageOptions, Work
from torchslicer.pipeline.step import LossCollector, check_finite, total_loss
from torchslicer.schedule import Action, ActionKind
from torchslicer.transport.frame import Frame, FrameKind

TARGET_VALUE = 0
"""The value number of targets, which are no value of the graph."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of a cut model."""

    graph: ModelGraph
    stage_of: tuple[int, ...]
    routes: tuple[Route, ...]
    evaluation_graph: ModelGraph
    evaluation_stage_of: tuple[int, ...]
    evaluation_routes: tuple[Route, ...]
    held: tuple[int, ...]
    rank_of: tuple[int, ...]
    device: torch.device
    options: TrainingOptions


Tell = Callable[..., None]
"""Sends a message, and tensors after it, to the coordinator."""


class RankSession:
    """See the module's docstring.

    Args:
        part: What the rank holds.
        links: Channels to other ranks and to the coordinator.
        tell: Sends a message to the coordinator.
        ask: Waits for the `Scale` message of a step.
    """

    def __init__(self, part: Part, links: Links, tell: Tell, ask: Callable[[int], Scale]) -> None:
        self.part = part
        self.links = links
        self.generation = links.key.generation
        self._tell, self._ask = tell, ask
        self.exchange = RankExchange(links, part.held, part.rank_of)
        devices = [part.device] * (part.stage_of[-1] + 1)
        self.rank = Rank(
            part.graph, part.stage_of, part.routes, held=part.held, devices=devices, options=part.options,
            exchange=self.exchange,
        )  # fmt: skip
        self._evaluation = self._evaluation_runtime()
        self._is_last = part.stage_of[-1] in part.held
        self._reports: bool | None = None

    def _evaluation_runtime(self) -> Runtime:
        part = self.part
        autocast = torch.bfloat16 if part.options.mixed_precision else None
        stages = {
            index: Stage(
                index, part.evaluation_graph, part.evaluation_stage_of, part.evaluation_routes,
                options=StageOptions(part.device, autocast),
            )
            for index in part.held
        }  # fmt: skip
        return Runtime(stages, exchange=self.exchange)

    def handle(self, message: Message) -> None:
        """Do what a message says.

        Raises:
            StageError: A stage raised.
            ProtocolError: The message is none that a run knows.
        """
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Evaluate):
            self._evaluate(message.batch)
        elif isinstance(message, EndEpoch):
            self.rank.advance("epoch", message.metrics)
        elif isinstance(message, Gather):
            self._gather()
        elif isinstance(message, Settle):
            self._tell(Settled(generation=self.generation))
        else:
            raise ProtocolError(f"message '{type(message).__name__}' does not belong into a run")

    def close(self) -> None:
        """Forget the run."""
        self.rank.close()
        self.links.close()

    # -- a step ----------------------------------------------------------------------------------------------

    def _step(self, message: Step) -> None:
        found: list[torch.Tensor] = []
        reported_aux = False
        for number, batch in enumerate(message.batches):
            losses = _Losses(message.step, len(batch.works), found)
            self.exchange.begin(batch.pass_index)
            self.rank.run_batch(_Works(self, self.rank.runtime, batch, with_target=self._is_last), losses)
            # Only now: the coordinator goes on as soon as it knows them, and on a machine that holds everything it
            # would take a core from the last backward passes.
            reported_aux |= self._report(message.step, number, losses.collector)
        if self._reports is None:
            self._reports = self._is_last or reported_aux
        self.rank.finish_batches(self._exchange_tied(message.batches[-1].pass_index))
        self._clip(message.step)
        self.rank.step()
        self._tell(Stepped(generation=self.generation, step=message.step))

    def _report(self, step: int, batch: int, collector: LossCollector) -> bool:
        """Tell the coordinator what a batch's losses are; return whether any was auxiliary.

        In the first step every rank reports, later those that had something to say.
        """
        main, aux = collector.by_microbatch()
        has_aux = any(aux.values())
        if self._reports is False and has_aux:
            raise StageError("an auxiliary loss came up that was not there in the first step")
        if self._reports is not False:
            message = Losses(
                generation=self.generation,
                step=step,
                batch=batch,
                main={str(index): number_of(loss) for index, loss in main.items()},
                aux={str(index): [number_of(loss) for loss in losses] for index, losses in aux.items()},
            )
            self._tell(message)
        return has_aux

    def _exchange_tied(self, pass_index: int) -> dict[str, dict[int, torch.Tensor | None]]:
        """Send the gradients of tied parameters' uses to the other ranks that hold a copy, and take theirs."""
        foreign: dict[str, dict[int, torch.Tensor | None]] = {}
        table, part = self.rank.table, self.part
        for number, (name, units) in enumerate(part.graph.shared.items()):
            ranks = {part.rank_of[part.stage_of[unit]]: part.stage_of[unit] for unit in units}
            mine = {unit: part.stage_of[unit] in part.held for unit in units}
            if len(ranks) == 1 or not any(mine.values()):
                continue
            own_rank = part.rank_of[part.held[0]]
            for unit in (unit for unit in units if mine[unit]):
                gradient = table.aliases[name][unit].grad
                for rank, stage in ranks.items():
                    if rank != own_rank:
                        self.links.send(rank, [self._tied_frame(gradient, pass_index, stage, number, unit)])
            others = [unit for unit in units if not mine[unit]]
            keys = [(FrameKind.STATE, pass_index, part.held[0], number, unit) for unit in others]
            frames: list[Frame] = self.links.mailbox.take(keys)
            foreign[name] = {u: _tensor_or_none(f, part.device) for u, f in zip(others, frames, strict=True)}
        return foreign

    def _tied_frame(self, gradient: torch.Tensor | None, pass_index: int, stage: int, number: int, unit: int) -> Frame:
        names = self.links.address(pass_index, stage, number, unit).fields()
        if gradient is None:
            return Frame.of_bytes(FrameKind.STATE, b"", **names)
        return Frame.of_tensor(FrameKind.STATE, gradient.detach().clone(), **names)

    def _clip(self, step: int) -> None:
        if self.part.options.max_grad_norm is None:
            return
        norms = {name: number_of(norm) for name, norm in self.rank.norms().items()}
        self._tell(Norms(generation=self.generation, step=step, norms=norms))
        self.rank.scale_gradients(tensor_of(self._ask(step).coefficient))

    # -- evaluation and state --------------------------------------------------------------------------------

    def _evaluate(self, batch: BatchInfo) -> None:
        outputs: list[Any] = []
        runtime = self._evaluation
        self.exchange.begin(batch.pass_index)
        actions = [Action(ActionKind.F, stage, index) for index in range(len(batch.works)) for stage in runtime.stages]
        works = _Works(self, runtime, batch, with_target=False)
        graph = self.part.evaluation_graph
        with evaluation_mode(graph.model, *graph.modules.values()), preserved_rng((self.part.device,)):
            runtime.run(actions, works, lambda _, result: outputs.append(result.output), training=False)
        if self.part.evaluation_stage_of[-1] in self.part.held:
            address = self.links.address(batch.pass_index, 0, 0, 0)
            packet = Export(outputs[-1]).take()
            self.links.send(COORDINATOR, packet_frames(FrameKind.OUTPUT, packet, address))

    def _gather(self) -> None:
        tensors: dict[str, torch.Tensor] = dict(self.rank.table.owned())
        first: dict[str, int] = {}
        for unit in self.part.graph.units:
            for name in unit.buffers:
                first.setdefault(name, self.part.stage_of[unit.index])
        mine = [name for name, stage in first.items() if stage in self.part.held]
        tensors |= {name: current_buffer(self.part.graph, name) for name in mine}
        cpu = [tensor.detach().cpu() for tensor in tensors.values()]
        self._tell(State(generation=self.generation, tensors=list(tensors)), cpu)


class _Losses:
    """Takes the results of a batch in; once its last micro-batch is through, the step's losses must be finite.

    *found* collects the losses of all batches of the step.
    """

    def __init__(self, step: int, num_microbatches: int, found: list[torch.Tensor]) -> None:
        self._step, self._left, self._found = step, num_microbatches, found
        self.collector = LossCollector()

    def __call__(self, microbatch: int, result: Result) -> None:
        self.collector.add(microbatch, result)
        self._left -= 1
        if not self._left:
            self._found += self.collector.in_order()
            if self._found:
                check_finite(total_loss(self._found), self._step)


class _Works(Sequence[Work]):
    """The micro-batches of a batch; inputs and targets are waited for when a stage comes to them."""

    def __init__(self, session: RankSession, runtime: Runtime, batch: BatchInfo, *, with_target: bool) -> None:
        self._mailbox = session.links.mailbox
        self._batch = batch
        [stage] = [runtime.stages[index] for index in session.part.held]
        self._stage = stage.index
        numbers = {entry.name: index for index, entry in enumerate(stage.graph.inputs)}
        self._names = {name: numbers[name] for name in stage.input_names}
        self._with_target = with_target

    def __len__(self) -> int:
        return len(self._batch.works)

    def __iter__(self) -> Iterator[Work]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        info = self._batch.works[index]
        keys = [(FrameKind.INPUT, self._batch.pass_index, self._stage, index, n) for n in self._names.values()]
        if self._with_target:
            keys.append((FrameKind.TARGET, self._batch.pass_index, self._stage, index, TARGET_VALUE))
        values = [packet_value(packet) for packet in self._mailbox.take(keys)]
        target = values.pop() if self._with_target else None
        inputs = dict(zip(self._names, values, strict=True))
        return Work(index, inputs, target, info.share, info.aux_share, info.key, info.position)


def packet_value(packet: Any) -> Any:
    """Return the value that a packet holds."""
    return pytree.tree_unflatten(list(packet.leaves), packet.spec)


def number_of(tensor: torch.Tensor) -> Number:
    """Return a tensor of one element as a message."""
    return Number(value=float(tensor), dtype=str(tensor.dtype).removeprefix("torch."))  # type: ignore[arg-type]


def tensor_of(number: Number) -> torch.Tensor:
    """Return the tensor that `number_of` was given."""
    return torch.tensor(number.value, dtype=getattr(torch, number.dtype))


def _tensor_or_none(frame: Frame, device: torch.device) -> torch.Tensor | None:
    return None if isinstance(frame.payload, bytes) else frame.payload.to(device)


@contextlib.contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Let torch use *threads* threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

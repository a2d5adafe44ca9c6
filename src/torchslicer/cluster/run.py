"""One run, seen from the coordinator: parts given out, steps started, losses and state collected."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchslicer.cluster.coordinator import Coordinator, Member
from torchslicer.cluster.hub import PLAIN, open_link, run_number
from torchslicer.cluster.links import COORDINATOR, Links, RunKey
from torchslicer.cluster.mailbox import Mailbox
from torchslicer.cluster.members import share_threads
from torchslicer.cluster.messages import (
    Abort,
    Assign,
    Attach,
    BatchInfo,
    EndEpoch,
    Endpoint,
    Evaluate,
    Gather,
    Losses,
    Message,
    Norms,
    Peer,
    Ready,
    Release,
    Released,
    Scale,
    Settle,
    Settled,
    State,
    Step,
    WorkInfo,
)
from torchslicer.cluster.packing import Address, packet_frames
from torchslicer.cluster.part import ModeCut, ShippedPart
from torchslicer.cluster.security import Protection
from torchslicer.cluster.session import TARGET_VALUE, number_of, packet_value, tensor_of
from torchslicer.errors import ShippingError, TorchSlicerError, TransportError, WorkerFailureError
from torchslicer.pipeline.boundary import Export
from torchslicer.pipeline.stage import Work, inputs_of_stage
from torchslicer.transport.base import Channel
from torchslicer.transport.frame import FrameKind

logger = logging.getLogger("torchslicer.distributed")

_ABORT_TIMEOUT_S = 2.0
_LONGEST_HOLD_S = 1.0
_INNER_ABORT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunSettings:
    """How a run is carried out; ``same_host`` lets processes of one host use UNIX sockets."""

    run_id: str
    transport: str = "tcp"
    same_host: bool = True
    stall_timeout_s: float = 600.0
    start_timeout_s: float = 60.0
    protection: Protection = PLAIN


class ClusterRun:
    """A run on workers, one stage a worker; ``members[i]`` holds stage ``i``.

    Args:
        coordinator: Where the workers are registered.
        members: The workers, in the order of stages.
        settings: How the run is carried out.
        generation: Number of the run on these workers.
        training: The cut in training mode.
        evaluation: The cut in evaluation mode.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        members: Sequence[Member],
        settings: RunSettings,
        *,
        generation: int,
        training: ModeCut,
        evaluation: ModeCut,
    ) -> None:
        self.coordinator = coordinator
        self.members = list(members)
        self.settings = settings
        self.generation = generation
        self.threads = share_threads(self.members)
        self.training = training
        self.evaluation = evaluation
        self._secret = secrets.token_hex(16)
        self._mailbox = Mailbox(settings.stall_timeout_s)
        key = RunKey(run_number(settings.run_id, self._secret), generation)
        self._links = Links(key, self._mailbox, on_lost=self._on_lost, send_timeout_s=settings.stall_timeout_s)
        self._pass = 0
        self._reporting: list[Member] | None = None
        self.routes_taken: dict[str, str] = {}
        self._inputs = {
            mode: [inputs_of_stage(cut.graph, cut.stage_of, stage) for stage in range(len(self.members))]
            for mode, cut in ((True, training), (False, evaluation))
        }
        self._inner = [member for member in self.members if member.inner is not None]
        coordinator.inbox.begin(generation, self.members, on_trouble=self._on_trouble)

    def _on_lost(self, rank: int, error: TorchSlicerError) -> None:
        self._mailbox.fail(WorkerFailureError(f"{self.members[rank].with_stage}: the data connection broke: {error}"))

    def _on_trouble(self) -> None:
        """Wake whoever waits for data or for room to send: a worker has failed, and the coordinator knows the cause."""
        self._mailbox.fail(WorkerFailureError("a worker failed"))

    # -- start and end ---------------------------------------------------------------------------------------

    def start(self, parts: Sequence[ShippedPart]) -> None:
        """Give every worker its part and connect to all of them.

        Raises:
            ShippingError: A worker does not trust a package that its part needs.
            WorkerFailureError: A worker failed or did not get ready.
        """
        for member, part in zip(self.members, parts, strict=True):
            _check_trust(member, part)
        for rank, (member, part) in enumerate(zip(self.members, parts, strict=True)):
            self._send(member, self._assign(rank, part, self.threads[member.node]), list(part.tensors.values()))
        for rank, member in enumerate(self.members):
            try:
                self._link(rank, member)
            except TransportError as error:
                raise self._cause(member, error) from error
        self._collect(Ready, self.members, timeout_s=self.settings.start_timeout_s)

    def _link(self, rank: int, member: Member) -> None:
        channel, self.routes_taken[member.node] = self._attached(member)
        self._links.add(rank, channel)

    def _attached(self, member: Member) -> tuple[Channel, str]:
        if member.inner is not None:
            return member.inner.attach(), "memory"
        attach = Attach(run_id=self.settings.run_id, generation=self.generation, rank=COORDINATOR, secret=self._secret)
        return open_link(
            self._endpoints(member), member.hello.host, attach, node=member.node, transport=self.settings.transport,
            protection=self.settings.protection, timeout_s=self.settings.start_timeout_s, check=self._check,
        )  # fmt: skip

    def _check(self) -> None:
        """Raise what ended the run, if anything has."""
        if self._mailbox.failure is not None:
            self.coordinator.inbox.raise_cause()
            self._mailbox.check()

    def _assign(self, rank: int, part: ShippedPart, threads: int) -> Assign:
        peers = [
            Peer(rank=index, node=m.node, host=m.hello.host, endpoints=self._endpoints(m))
            for index, m in enumerate(self.members)
        ]
        return Assign(
            run_id=self.settings.run_id,
            generation=self.generation,
            rank=rank,
            threads=threads,
            secret=self._secret,
            transport=self.settings.transport,  # type: ignore[arg-type]
            peers=peers,
            links=sorted(self._neighbours(rank)),
            stall_timeout_s=self.settings.stall_timeout_s,
            description=part.description,
            tensors=list(part.tensors),
        )

    def _endpoints(self, member: Member) -> list[Endpoint]:
        """Return where others may connect to *member*; without ``same_host`` its UNIX socket is not told."""
        found = member.hello.endpoints
        return found if self.settings.same_host else [entry for entry in found if entry.transport != "unix"]

    def _neighbours(self, rank: int) -> set[int]:
        """Ranks that exchange anything with *rank*: values, gradients, or gradients of tied parameters."""
        groups = [
            {route.producer, *route.consumers} for cut in (self.training, self.evaluation) for route in cut.routes
        ]
        graph, stage_of = self.training.graph, self.training.stage_of
        groups += [{stage_of[unit] for unit in units} for units in graph.shared.values()]
        return {other for group in groups if rank in group for other in group} - {rank}

    def release(self) -> None:
        """End the run; workers are free for the next."""
        self._tell_all(Release(generation=self.generation))
        self._collect(Released, self.members, timeout_s=self.settings.start_timeout_s)
        self.coordinator.inbox.end()
        self._links.close()

    def abort(self, reason: str) -> None:
        """Give the run up; nothing is raised.

        Workers that wait or have failed are free at once. One that computes hears of it when it is through with what it
        computes: it stays registered, and is not given a part of another run before.
        """
        live = [member for member in self.members if member.lost is None]
        for member in live:
            try:
                member.control.send(Abort(generation=self.generation, reason=reason[:1000]), timeout_s=_ABORT_TIMEOUT_S)
            except TransportError as error:
                self.coordinator.give_up(member, error)
        self._links.close(timeout_s=0)
        self.coordinator.wait_released(live, timeout_s=_ABORT_TIMEOUT_S)
        # While a stage in this process computes, it uses the random numbers that are the caller's afterwards.
        if not self.coordinator.wait_released(self._inner, timeout_s=0):
            logger.warning(
                "%s: a stage in this process still computes; it is waited for, up to %g s (Ctrl-C: no longer)",
                reason, _INNER_ABORT_TIMEOUT_S,
            )  # fmt: skip
            self.coordinator.wait_released(self._inner, timeout_s=_INNER_ABORT_TIMEOUT_S)
        self.coordinator.inbox.end()

    # -- steps -----------------------------------------------------------------------------------------------

    def next_pass(self) -> int:
        """Return the number of the next pass."""
        self._pass += 1
        return self._pass

    def send_batch(self, works: Sequence[Work], pass_index: int, *, training: bool) -> None:
        """Send inputs to the stages that use them, and targets to the last stage."""
        cut = self.training if training else self.evaluation
        numbers = {entry.name: index for index, entry in enumerate(cut.graph.inputs)}
        for work in works:
            for stage, names in enumerate(self._inputs[training]):
                for name in names:
                    address = self._links.address(pass_index, stage, work.microbatch, numbers[name])
                    self._send_value(FrameKind.INPUT, work.inputs[name], address)
            if training:
                address = self._links.address(pass_index, cut.stage_of[-1], work.microbatch, TARGET_VALUE)
                self._send_value(FrameKind.TARGET, work.target, address)

    def _send_value(self, kind: FrameKind, value: Any, address: Address) -> None:
        try:
            self._links.send(address.stage, packet_frames(kind, Export(value).take(), address))
        except (TransportError, WorkerFailureError) as error:
            raise self._cause(self.members[address.stage], error) from error

    def start_step(self, step: int, batches: Sequence[tuple[int, Sequence[Work]]]) -> None:
        """Let all workers run a step whose batches were sent under the given passes."""
        infos = [_batch_info(pass_index, works) for pass_index, works in batches]
        self._tell_all(Step(generation=self.generation, step=step, batches=infos))

    def wait_through(self, step: int) -> None:
        """Wait until stages in this process are through with *step*."""
        self.coordinator.inbox.wait_through(self._inner, step, timeout_s=self.settings.stall_timeout_s)

    def settle(self) -> None:
        """Wait until stages in this process have done all that they were told to."""
        for member in self._inner:
            self._send(member, Settle(generation=self.generation))
        if self._inner:
            self._collect(Settled, self._inner)

    def wait_begun(self, step: int) -> None:
        """Wait until the last stage is through with the step before *step*; failures show up in `losses`.

        Until then all cores of a machine that holds everything are busy with what the next step waits for. What the
        driver does meanwhile (fetch and send the next batches) would delay it.
        """
        self.coordinator.inbox.wait_stepped(self.members[-1], step - 1, timeout_s=_LONGEST_HOLD_S)

    def losses(self, step: int, num_batches: int) -> list[torch.Tensor]:
        """Wait for the losses of a step and return them in the order of batches, micro-batches and stages."""
        members = self.members if self._reporting is None else self._reporting
        found: list[torch.Tensor] = []
        has_aux: set[str] = {self.members[-1].node}
        for batch in range(num_batches):
            reports = self._collect(Losses, members, where=lambda m, batch=batch: m.step == step and m.batch == batch)
            ordered = [reports[m.node][0] for m in members]
            has_aux |= {m.node for m in members if reports[m.node][0].aux}
            found += _merged(ordered)
        if self._reporting is None:
            self._reporting = [member for member in self.members if member.node in has_aux]
        return found

    def norms(self, step: int) -> dict[str, torch.Tensor]:
        """Wait for the gradient norms of a step, by parameter, in the model's order."""
        reports = self._collect(Norms, self.members, where=lambda m: m.step == step)
        found = {name: tensor_of(n) for message, _ in reports.values() for name, n in message.norms.items()}
        return {name: found[name] for name in self.training.graph.parameters if name in found}

    def scale(self, step: int, coefficient: torch.Tensor) -> None:
        """Let all workers multiply their gradients."""
        self._tell_all(Scale(generation=self.generation, step=step, coefficient=number_of(coefficient)))

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Tell all workers that an epoch is over."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._tell_all(EndEpoch(generation=self.generation, metrics=numbers))

    def evaluate(self, works: Sequence[Work]) -> Any:
        """Run a batch in evaluation mode and return the model's output."""
        pass_index = self.next_pass()
        self._tell_all(Evaluate(generation=self.generation, batch=_batch_info(pass_index, works)))
        self.send_batch(works, pass_index, training=False)
        try:
            [packet] = self._mailbox.take([(FrameKind.OUTPUT, pass_index, 0, 0, 0)])
        except (TransportError, WorkerFailureError) as error:
            raise self._cause(self.members[-1], error) from error
        self.settle()
        return packet_value(packet)

    def gather(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers."""
        self._tell_all(Gather(generation=self.generation))
        reports = self._collect(State, self.members)
        return {
            name: tensor
            for message, tensors in reports.values()
            for name, tensor in zip(message.tensors, tensors, strict=True)
        }

    # -- helpers ---------------------------------------------------------------------------------------------

    def _collect(
        self, kind: type[Message], members: Sequence[Member], *, timeout_s: float | None = None, where: Any = None
    ) -> dict[str, tuple[Any, list[torch.Tensor]]]:
        return self.coordinator.inbox.collect(
            kind,
            members,
            timeout_s=self.settings.stall_timeout_s if timeout_s is None else timeout_s,
            where=lambda m: m.generation == self.generation and (where is None or where(m)),
        )

    def _tell_all(self, message: Message) -> None:
        for member in self.members:
            self._send(member, message)

    def _send(self, member: Member, message: Message, tensors: Iterable[torch.Tensor] = ()) -> None:
        try:
            member.control.send(message, list(tensors))
        except TransportError as error:
            raise self._cause(member, error) from error

    def _cause(self, member: Member, error: TorchSlicerError) -> WorkerFailureError:
        """Raise what ended the run, if a worker says it; else return *error* with the name of the worker."""
        self.coordinator.inbox.raise_cause()
        return error if isinstance(error, WorkerFailureError) else WorkerFailureError(f"{member.with_stage}: {error}")


def _check_trust(member: Member, part: ShippedPart) -> None:
    trusted = member.hello.trusted
    missing = [
        module
        for module in part.required
        if not any(module == package or module.startswith(package + ".") for package in trusted)
    ]
    if missing:
        packages = sorted({module.split(".")[0] for module in missing})
        raise ShippingError(
            f"{member} does not trust {missing}, which its part of the model needs; start it with "
            + " ".join(f"--trust {package}" for package in packages)
            + ", from a place where it can import them"
        )


def _batch_info(pass_index: int, works: Sequence[Work]) -> BatchInfo:
    infos = [WorkInfo(share=w.share, aux_share=w.aux_share, key=w.key, position=w.position) for w in works]
    return BatchInfo(pass_index=pass_index, works=infos)


def _merged(reports: Sequence[Losses]) -> list[torch.Tensor]:
    """Put the losses of a batch in the order in which a single process would have met them."""
    found: list[torch.Tensor] = []
    for index in sorted({int(key) for report in reports for key in (*report.main, *report.aux)}):
        found += [tensor_of(report.main[str(index)]) for report in reports if str(index) in report.main]
        found += [tensor_of(number) for report in reports for number in report.aux.get(str(index), [])]
    return found

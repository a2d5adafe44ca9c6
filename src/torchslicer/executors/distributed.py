"""The distributed executor: stages in worker processes, driven from here."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from torchslicer.cluster.coordinator import Coordinator, Liveness, Member
from torchslicer.cluster.door import STRANGER
from torchslicer.cluster.part import ModeCut, ShippedPart, built_stages, encode_part
from torchslicer.cluster.run import ClusterRun, RunSettings
from torchslicer.config import RunConfig
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import ConfigError, DeadlineError, TransportError, WorkerFailureError
from torchslicer.executors.base import Cut, ForwardResult, StepResult, Upcoming, no_run
from torchslicer.executors.checks import check_enough, check_inputs_stay, check_members, check_statistics
from torchslicer.executors.described import arguments_checked, choose_address, choose_discovery, discovery_timeout_s
from torchslicer.executors.hosted import HostedStage
from torchslicer.executors.local import EVALUATION_STREAM, LocalExecutor
from torchslicer.executors.protect import (
    Tls,
    check_plain,
    check_trust,
    given_protection,
    how_to_start,
    protect_coordinator,
)
from torchslicer.executors.released import fill, release
from torchslicer.pipeline.batch import Batch
from torchslicer.pipeline.criterion import Criterion
from torchslicer.pipeline.optimizers import clip_coefficient, global_norm
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.rng import stream_key
from torchslicer.pipeline.stage import Work, find_routes
from torchslicer.pipeline.step import check_finite, make_works, total_loss
from torchslicer.transport.base import ChannelOptions
from torchslicer.transport.tcp import TcpListener, connect

logger = logging.getLogger("torchslicer.distributed")

_RETRY_S = 0.2


@dataclass
class _Sent:
    """A step as the workers know it: the passes of its batches."""

    step: int
    batches: list[tuple[int, list[Work]]]


class DistributedExecutor:
    """Runs every stage in a worker of its own, anywhere.

    Args:
        discovery: `CoordinatorDiscovery` (workers register here) or `StaticDiscovery` (a list of workers that listen).
            By default what the section ``discovery`` of *run_config* describes, else the former.
        coordinator_addr: Where to listen for workers, ``HOST:PORT``; port 0 takes a free one. By default
            ``network.coordinator_bind_address`` of *run_config*, and without that a free port of loopback.
        run_config: What is not given here, time-outs and transport; by default those of `RunConfig`.
        transport: ``"grpc"`` or ``"tcp"`` for tensors between hosts; on one host UNIX sockets are used either way.
        same_host: Use UNIX sockets between processes of one host; False lets tensors take *transport* there, too.
        host_stage: 0 lets this process hold stage 0, so that the inputs stay in it; the peers of a `StaticDiscovery`
            hold the other stages.
        host_threads: Threads of torch for that stage; by default the cores, shared with workers on this machine.
        tls: Certificates: the files ``ca``, ``cert``, ``key``, and the ``names`` that peers may have; by default
            those of ``run_config.network.tls``. A coordinator that listens beyond loopback and has none makes its own;
            ``join_command`` then is the line that starts a worker.
        insecure: Allow plain text beyond loopback; takes effect only with ``TS_INSECURE=1`` in the environment.
        free_local_weights: Free the memory of the model's parameters here once the workers have them; they come back at
            the end of training, and `SlicedModel.state_dict` fetches them meanwhile. When training fails they are lost:
            whatever needs them then raises, until `SlicedModel.load_state_dict` has filled them in.
        stall_timeout_s: How long nothing at all may come from the workers of a run before it is given up. Workers that
            die or go silent are noticed much sooner; this is for a stage that computes and never returns.

    Attributes:
        workers: Names of registered workers that the next runs use, in the order of stages; by default the first ones
            by name.
        at_most: How many workers there can be, where no others can come; more stages are refused at once.

    Raises:
        ConfigError: An argument is of another kind, or contradicts another.
        SecurityError: What was asked is not safe; the message names the ways out.

    Example:
        >>> executor = DistributedExecutor(coordinator_addr="127.0.0.1:0")
        >>> executor.address.startswith("127.0.0.1:")
        True
        >>> executor.close()
    """

    @arguments_checked
    def __init__(
        self,
        discovery: CoordinatorDiscovery | StaticDiscovery | None = None,
        coordinator_addr: str | None = None,
        run_config: RunConfig | None = None,
        *,
        transport: str | None = None,
        same_host: bool = True,
        host_stage: int | None = None,
        host_threads: int | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        free_local_weights: bool = False,
        stall_timeout_s: float = 600.0,
    ) -> None:
        self.config = run_config or RunConfig()
        self.discovery = choose_discovery(discovery, self.config)
        coordinator_addr = choose_address(coordinator_addr, run_config)
        self.transport = transport or self.config.transport.tensor
        if host_stage is not None and (host_stage != 0 or not isinstance(self.discovery, StaticDiscovery)):
            raise ConfigError(
                f"host_stage: expected 0 (the stage that the inputs go to), with StaticDiscovery(peers=[...]) for the "
                f"others; got {host_stage!r} with {type(self.discovery).__name__}"
            )
        self.wants_upcoming = host_stage is None  # a stage in this process has its inputs anyway
        self.same_host = same_host
        self.free_local_weights = free_local_weights
        self.workers: Sequence[str] | None = None
        self.at_most: int | None = None
        self.stall_timeout_s = stall_timeout_s
        self.run_id = self.discovery.run_id or self.config.run_id
        self.protection = given_protection(self.config, tls=tls, insecure=insecure)
        self.insecure, gate = False, None
        if isinstance(self.discovery, CoordinatorDiscovery):
            self.protection, gate, self.insecure = protect_coordinator(coordinator_addr, self.run_id, self.protection)
        tolerance = self.config.fault_tolerance
        self.coordinator = Coordinator(
            self.run_id,
            liveness=Liveness(tolerance.heartbeat_interval_s, tolerance.ping_timeout_s),
            tag_filter=getattr(self.discovery, "tag_filter", ()) or self.config.discovery.tag_filter,
            hello_timeout_s=self.config.discovery.registration_rpc_timeout_s,
            protection=self.protection.without_joining(),
            gate=gate,
        )
        self.address = self.join_command = ""
        self._host = None if host_stage is None else HostedStage(self.coordinator, host_threads)
        self._local = LocalExecutor()
        self._generation = 0
        self._run: ClusterRun | None = None
        self._cut: Cut | None = None
        self._options: TrainingOptions | None = None
        self._sent: _Sent | None = None
        self._rate: _Rate | None = None
        try:
            if isinstance(self.discovery, CoordinatorDiscovery):
                self._listen(coordinator_addr, gate)
            _import_ahead()
        except BaseException:  # Ctrl-C too: nobody has the executor yet to close it
            self.close()
            raise

    def _listen(self, address: str, gate: Any) -> None:
        """Open the port that workers register at."""
        listener = TcpListener(address, tls=self.protection.server, options=ChannelOptions(limits=STRANGER))
        self.address = listener.address
        self.join_command, self.coordinator.how_to_start = how_to_start(self.address, gate, self.protection)
        self.coordinator.listen(listener)

    # -- a run -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""
        return self._run is not None

    def setup(self, cut: Cut, options: TrainingOptions) -> None:
        """Wait for the workers, give each its stage, and link them.

        Raises:
            SliceError: The cut cannot be run by several processes.
            ShippingError: Something of the model cannot be carried to another process.
            WorkerFailureError: Workers did not come, or failed.
        """
        hosted = int(self._host is not None)
        peers = self.discovery.peers if isinstance(self.discovery, StaticDiscovery) else None
        check_enough(cut.num_stages, at_most=self.at_most, peers=peers, hosted=hosted)
        check_statistics(cut)
        if self._host is not None:
            check_inputs_stay(cut)
        training = _mode_cut(cut.graphs.training, cut.stage_of)
        evaluation = _mode_cut(cut.graphs.evaluation, cut.evaluation_stage_of)
        ranks = range(cut.num_stages)
        built = built_stages(cut.builder, training, evaluation)
        parts = [encode_part(training, evaluation, stage, ranks, options, built=built) for stage in ranks]
        members = self._members(parts)
        check_members(members, parts)
        self._generation += 1
        settings = RunSettings(
            self.run_id, self.transport, same_host=self.same_host, protection=self.coordinator.protection,
            stall_timeout_s=self.stall_timeout_s,
        )  # fmt: skip
        run = ClusterRun(
            self.coordinator, members, settings, generation=self._generation, training=training, evaluation=evaluation
        )
        self._run, self._cut, self._options, self._sent = run, cut, options, None
        self._rate = _Rate(options)
        run.start(parts)
        how = ", ".join(
            f"{member.node}: stage {rank} ({run.threads[member.node]} threads)" for rank, member in enumerate(members)
        )
        logger.info("run %s: %s; data by %s", self.run_id, how, sorted(set(run.routes_taken.values())))
        if self.free_local_weights:
            release(cut.graphs.training)

    def _members(self, parts: Sequence[ShippedPart]) -> list[Member]:
        count, timeout_s = len(parts), self._discovery_timeout_s()
        if isinstance(self.discovery, CoordinatorDiscovery):
            if self.workers is None:
                return self.coordinator.wait_for(count, timeout_s=timeout_s)
            members = [self.coordinator.members[name] for name in self.workers]
            for member in members:
                self.coordinator.wait_until_free(member, timeout_s=timeout_s)
            return members
        hosted = [] if self._host is None else [self._host.member(parts[0])]
        members = [*hosted, *self._dialled(count - len(hosted))]
        for member in members:
            self.coordinator.wait_until_free(member, timeout_s=timeout_s)
        return members

    def _discovery_timeout_s(self) -> float:
        return discovery_timeout_s(self.discovery, self.config)

    def _dialled(self, count: int) -> list[Member]:
        """Connect to the listed workers, in the order of the list."""
        peers = list(self.discovery.peers)  # type: ignore[union-attr]
        return [self._dial(address) for address in peers[:count]]

    def _dial(self, address: str) -> Member:
        for member in self.coordinator.live():
            if member.dialled == address:
                return member
        self.insecure |= self.protection.check_connect(address).insecure
        deadline = time.monotonic() + self._discovery_timeout_s()
        while True:
            try:
                member = self.coordinator.adopt(connect(address, timeout_s=5.0, tls=self.protection.client))
                self.coordinator.wait_until_heard(member, timeout_s=max(deadline - time.monotonic(), _RETRY_S))
            except (TransportError, WorkerFailureError) as error:
                check_trust(error, f"the peer at {address} and this driver", self.protection)
                if time.monotonic() > deadline:
                    check_plain(address, self.protection)
                    busy = "; perhaps it serves another driver" if isinstance(error, DeadlineError) else ""
                    raise WorkerFailureError(f"no worker listens at {address}: {error}{busy}") from error
                time.sleep(_RETRY_S)
            else:
                member.dialled = address
                return member

    def train_step(self, batches: Sequence[Batch], step: int, upcoming: Upcoming | None = None) -> StepResult:
        """Run one optimizer step; the inputs of the *upcoming* one are sent while it runs.

        Raises:
            StageError: A stage raised; the message has the traceback of its worker.
            WorkerFailureError: A worker died or went silent.
            NonFiniteLossError: The loss is not finite; no parameter was updated.
        """
        run, options = self._running()
        ahead, self._sent = self._sent, None
        if ahead is not None and ahead.step == step:
            run.start_step(step, ahead.batches)
            sent = ahead
        else:
            sent = self._numbered(batches, step)
            run.start_step(step, sent.batches)  # first: stages begin with the first inputs while others are sent
            self._send(sent)
        if upcoming is not None:
            run.wait_begun(step)
            following = upcoming()
            self._sent = None if following is None else self._send(self._numbered(following, step + 1))
        losses = run.losses(step, len(sent.batches))
        total = total_loss(losses)
        check_finite(total, step)
        norm = None
        if options.max_grad_norm is not None:
            found = global_norm(list(run.norms(step).values()))
            run.scale(step, clip_coefficient(found, options.max_grad_norm))
            norm = float(found)
        run.wait_through(step)
        lr = self._rate.step() if self._rate is not None else 0.0
        return StepResult(float(total), sum(batch.size for batch in batches), lr, norm)

    def _numbered(self, batches: Sequence[Batch], step: int) -> _Sent:
        run, options = self._running()
        return _Sent(step, [(run.next_pass(), works) for works in make_works(batches, options, step)])

    def _send(self, sent: _Sent) -> _Sent:
        for pass_index, works in sent.batches:
            self._running()[0].send_batch(works, pass_index, training=True)
        return sent

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Advance the schedulers that step once an epoch."""
        self._running()[0].end_epoch(metrics)
        if self._rate is not None:
            self._rate.end_epoch(metrics)

    def teardown(self, *, failed: bool = False) -> None:
        """Fetch the trained weights into the model and let the workers go; after a failure only the latter."""
        run, self._run, self._sent = self._run, None, None
        if run is None:
            return
        try:
            if failed:
                run.abort("the run failed")
            else:
                self._end(run)
        finally:
            if self._host is not None:
                self._host.rest()

    def _end(self, run: ClusterRun) -> None:
        try:
            if self._cut is not None:
                fill(self._cut.graphs.training, run.gather())
            run.release()
        except BaseException:  # Ctrl-C too: the workers must be free for another run
            run.abort("the run could not be ended")
            raise

    def current_state(self, cut: Cut) -> Mapping[str, torch.Tensor] | None:
        """Fetch parameters and buffers from the workers while a run of *cut* lasts, between two of its steps."""
        return self._run.gather() if self._run is not None and self._cut is cut else None

    def forward(self, cut: Cut, batch: Batch, *, criterion: Criterion | None, mixed_precision: bool) -> ForwardResult:
        """Run a batch in evaluation mode: on the workers while a run of *cut* lasts, else here."""
        if self._run is None or self._cut is not cut:
            return self._local.forward(cut, batch, criterion=criterion, mixed_precision=mixed_precision)
        work = Work(0, batch.inputs, batch.target, key=stream_key(EVALUATION_STREAM, 0, 0))
        output = self._run.evaluate([work])
        if criterion is None:
            return ForwardResult(output)
        with torch.no_grad():
            return ForwardResult(output, float(criterion.loss(output, batch.target)))

    def close(self, *, shut_workers: bool = False) -> None:
        """Stop listening and end all connections; with *shut_workers*, tell the workers to exit."""
        self.teardown(failed=True)  # a run that is still there: nobody was left to end it
        if self._host is not None:
            self._host.stop()
        self.coordinator.close(shut_workers=shut_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> tuple[ClusterRun, TrainingOptions]:
        if self._run is None or self._options is None:
            raise no_run()
        return self._run, self._options


def _import_ahead() -> None:
    """Import, while the workers start, what the first optimizer of a process imports: it takes seconds.

    In the caller's thread: two threads that import parts of torch at the same time may meet half-made modules.
    """
    importlib.import_module("torch._dynamo")


class _Rate:
    """Follows the learning rate that the workers' schedulers produce, on a parameter that nobody trains."""

    def __init__(self, options: TrainingOptions) -> None:
        self._spec = options.scheduler
        self._optimizer = options.optimizer.build([("shadow", torch.nn.Parameter(torch.zeros(2, 2)))])
        self._scheduler = None
        if self._spec is not None and self._optimizer is not None:
            self._scheduler = self._spec.build(self._optimizer)

    def step(self) -> float:
        """Return the rate of this step, and go on to the next."""
        if self._optimizer is None:
            return 0.0
        rate = float(self._optimizer.param_groups[0]["lr"])
        self._optimizer.step()
        if self._spec is not None and self._spec.interval == "step":
            self._spec.step(self._scheduler, {})
        return rate

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Go on to the next epoch."""
        if self._spec is not None and self._spec.interval == "epoch" and self._scheduler is not None:
            self._spec.step(self._scheduler, metrics)


def _mode_cut(graph: object, stage_of: tuple[int, ...]) -> ModeCut:
    return ModeCut(graph, stage_of, find_routes(graph, stage_of))  # type: ignore[arg-type]

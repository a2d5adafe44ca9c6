"""P2P with the first stage in the driver's process: the bits of local training, and inputs that stay here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchslicer as ts
from tests.support.cluster import TRANSPORTS, Peers, free_address, listening, travelling_by, worker_thread
from tests.support.driver import sliced_train, train_case
from tests.support.models import GPT_CASE, MLP, MOE, UNET, Case
from tests.support.nets_boundary import Raising
from tests.support.nets_values import TwoInputs
from tests.support.oracle import ADAM, SGD, assert_same_bits
from torchslicer.cluster.links import Links
from torchslicer.discovery import StaticDiscovery
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.transport.frame import FrameKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def hosting(peers: Peers) -> Iterator[DistributedExecutor]:
    """An executor whose own process holds stage 0."""
    with peers.driver(host_stage=0, host_threads=1) as executor:
        train_case(MOE, SGD, n=3, steps=1, slice_options={"executor": executor})  # trusts what all cases need
        yield executor


def assert_exact(hosting: DistributedExecutor, case: Case, *, steps: int, **options: Any) -> None:
    """Fail unless stages here and at the peers give the bits of local training."""
    want = train_case(case, ADAM, n=2, steps=steps, dropout=0.1, **options)
    got = train_case(case, ADAM, n=3, steps=steps, dropout=0.1, slice_options={"executor": hosting}, **options)
    assert_same_bits(got, want, where=case.name)


@pytest.mark.parametrize("case", [GPT_CASE, MOE], ids=lambda case: case.name)
def test_hosting_the_first_stage_gives_the_bits_of_local_training(hosting: DistributedExecutor, case: Case) -> None:
    assert_exact(hosting, case, steps=4, n_micro_batches=4, schedule="1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", [MLP, GPT_CASE, MOE, UNET], ids=lambda case: case.name)
def test_hosting_with_every_transport(hosting: DistributedExecutor, case: Case, schedule: str, transport: str) -> None:
    with travelling_by(hosting, transport):
        assert_exact(hosting, case, steps=20, n_micro_batches=4, schedule=schedule)


def test_the_stage_stays_from_run_to_run(hosting: DistributedExecutor) -> None:
    [first] = [member for member in hosting.coordinator.live() if member.dialled is None]
    assert_exact(hosting, MLP, steps=1)
    assert [member for member in hosting.coordinator.live() if member.dialled is None] == [first]


class Traffic:
    """What the driver sends: by rank, kinds and bytes of frames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, executor: DistributedExecutor) -> None:
        self.kinds: dict[int, set[FrameKind]] = {}
        self.bytes: dict[int, int] = {}
        send = Links.send

        def watched(links: Links, rank: int, frames: Any, **options: Any) -> None:
            found = list(frames)
            if executor._run is not None and links is executor._run._links:  # else those of stage 0
                for frame in found:
                    self.kinds.setdefault(rank, set()).add(frame.header.kind)
            send(links, rank, found, **options)

        monkeypatch.setattr(Links, "send", watched)

    def callback(self, executor: DistributedExecutor) -> ts.TrainingCallback:
        """Return one that reads the counters of the channels."""
        traffic = self

        class Read(ts.TrainingCallback):
            def on_epoch_end(self, epoch: int, metrics: Any) -> None:
                assert executor._run is not None
                counters = executor._run._links.traffic()
                traffic.bytes = {rank: sent for rank, (sent, _) in counters.items()}

        return Read()


def test_hosting_the_first_stage_keeps_inputs_here(
    hosting: DistributedExecutor, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(monkeypatch, hosting)
    model = nn.Sequential(nn.Linear(4096, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [(torch.randn(64, 4096), torch.randint(4, (64,))) for _ in range(3)]
    sliced_train(
        model, batches, SGD, "cross_entropy", n=3, n_micro_batches=2, callbacks=[traffic.callback(hosting)],
        slice_options={"executor": hosting}, eval_loader=batches,
    )  # fmt: skip
    members = hosting.coordinator.live()
    assert [member.dialled for member in members if member.dialled is None] == [None]
    assert set(peers.addresses) <= {member.dialled for member in members}
    assert traffic.kinds == {0: {FrameKind.INPUT}, 2: {FrameKind.TARGET}}
    inputs, labels = 6 * 64 * 4096 * 4, 3 * 64 * 8
    assert inputs < traffic.bytes[0] < inputs * 1.1
    assert traffic.bytes[1] < 2_000
    assert labels < traffic.bytes[2] < labels + 4_000


def test_hosting_the_first_stage_refuses_inputs_that_other_stages_use(hosting: DistributedExecutor) -> None:
    x, late, y = torch.randn(4, 16), torch.randn(4, 16), torch.randint(4, (4,))
    with pytest.raises(ts.SliceError, match=r"stage 1 uses the input 'late'"):
        sliced_train(TwoInputs(), [(x, late, y)], SGD, "cross_entropy", n=2, slice_options={"executor": hosting})


def test_a_list_that_is_too_short_is_refused_before_anything_starts() -> None:
    with DistributedExecutor(StaticDiscovery(peers=["127.0.0.1:9"]), host_stage=0) as executor:
        with pytest.raises(
            ts.ConfigError, match="3 stages need 2 peers beside the one of this machine, the list has 1"
        ):
            train_case(MLP, SGD, n=3, steps=1, slice_options={"executor": executor})
        assert not executor.coordinator.live()


def test_its_end_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with listening(1) as peers, peers.driver(host_stage=0, host_threads=1) as executor:
        train_case(MLP, SGD, n=2, steps=1, slice_options={"executor": executor})
    assert "is gone" not in caplog.text


def children() -> set[str]:
    """Return the process ids of this process's children."""
    return {
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text(encoding="ascii").split()
    }


def test_it_is_a_thread_of_this_process_that_ends_with_the_executor() -> None:
    with listening(1) as peers:
        before = children(), set(threading.enumerate())
        with peers.driver(host_stage=0, host_threads=1) as executor:
            train_case(MLP, SGD, n=2, steps=1, slice_options={"executor": executor})
            assert children() == before[0]
            assert "torchslicer-stage-0" in {thread.name for thread in threading.enumerate()}
        left = {thread.name for thread in set(threading.enumerate()) - before[1]}
        assert not {name for name in left if "torchslicer" in name}


class Draws(ts.TrainingCallback):
    """Draws random numbers between steps, as a loader or a callback may."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self, step: int, metrics: Any) -> None:
        self.drawn.append(float(torch.rand(())))

    def on_evaluate(self, metrics: Any) -> None:
        self.drawn.append(float(torch.rand(())))


def drawn_while_training(**slice_options: Any) -> tuple[list[float], list[float]]:
    """Return what a callback, and what the caller afterwards, draws beside a model that draws itself."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    data = torch.utils.data.TensorDataset(torch.randn(96, 16), torch.randint(4, (96,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
    draws = Draws()
    ts.slice(model, n=2, **slice_options).train(
        loader, SGD, "cross_entropy", epochs=3, eval_loader=loader, num_microbatches=2, callbacks=[draws], run_dir=False
    )
    weights = [float(parameter.detach().sum()) for parameter in model.parameters()]
    return draws.drawn, [*torch.rand(3).tolist(), *weights]


def test_the_caller_and_the_stage_do_not_disturb_each_other_s_random_numbers(hosting: DistributedExecutor) -> None:
    assert drawn_while_training(executor=hosting) == drawn_while_training()


def test_torch_has_its_threads_back_after_a_run(hosting: DistributedExecutor) -> None:
    torch.set_num_threads(2)
    train_case(MLP, SGD, n=2, steps=1, slice_options={"executor": hosting})
    assert torch.get_num_threads() == 2
    beside: list[int] = []
    thread = threading.Thread(target=lambda: beside.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert beside == [2]


class Interrupts(ts.TrainingCallback):
    """Ctrl-C between two steps."""

    def on_step_end(self, step: int, metrics: Any) -> None:
        raise KeyboardInterrupt


class Ends(nn.Module):
    """Raises what is no `Exception`, at the third batch."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 16) to (B, 16)."""
        self.seen += 1
        if int(self.seen) >= 3:
            raise KeyboardInterrupt
        done: torch.Tensor = self.linear(x)
        return done


class Slow(Ends):
    """Takes its time, at the fourth micro-batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 16) to (B, 16)."""
        self.seen += 1
        if int(self.seen) >= 4:
            time.sleep(0.5)
        done: torch.Tensor = self.linear(x)
        return done


def test_an_error_of_the_stage_and_one_of_the_caller_leave_it_usable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchslicer.cluster.run._ABORT_TIMEOUT_S", 0.01)
    batches = [(torch.randn(8, 16), torch.randint(4, (8,)))] * 4
    raises, harmless = nn.Sequential(Raising(), nn.Linear(16, 4)), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    options: dict[str, Any] = {"epochs": 1, "run_dir": False}
    with listening(1) as peers, peers.driver(host_stage=0, host_threads=1) as hosting:
        with pytest.raises(ts.StageError, match=r"stage 0 on worker 'driver-\w+'") as caught:
            ts.slice(raises, n=2, executor=hosting).train(batches, SGD, "cross_entropy", **options)
        assert "ValueError: boom" in str(caught.value)
        interrupts = nn.Sequential(Ends(), nn.Linear(16, 4))
        with pytest.raises(ts.StageError, match=r"stage 0 on worker 'driver-\w+' \(this process\): KeyboardInterrupt"):
            ts.slice(interrupts, n=2, executor=hosting).train(batches, SGD, "cross_entropy", **options)
        with pytest.raises(ts.StageError, match="stage 1"):
            ts.slice(nn.Sequential(Slow(), Raising(), nn.Linear(16, 4)), cuts=["1"], executor=hosting).train(
                batches, SGD, "cross_entropy", num_microbatches=2, **options
            )
        assert "a stage in this process still computes; it is waited for" in caplog.text
        with pytest.raises(KeyboardInterrupt):
            ts.slice(harmless, n=2, executor=hosting).train(
                batches, SGD, "cross_entropy", callbacks=[Interrupts()], **options
            )
        want = train_case(MLP, ADAM, n=2, steps=2)
        assert_same_bits(train_case(MLP, ADAM, n=2, steps=2, slice_options={"executor": hosting}), want)


@pytest.mark.parametrize("host_stage", [None, 0])
def test_two_stages_in_one_process_are_refused(host_stage: int | None) -> None:
    addresses = [free_address(), free_address()]
    who = r"'driver-\w+' \(this process\) and worker 'one'" if host_stage == 0 else r"'one'.* and worker 'two'"
    with (
        worker_thread(listen=addresses[0], name="one"),
        worker_thread(listen=addresses[1], name="two"),
        DistributedExecutor(StaticDiscovery(peers=addresses), host_stage=host_stage) as executor,
        pytest.raises(ts.ConfigError, match=rf"stages 0 and 1 would be in one process, that of worker {who}"),
    ):
        train_case(MLP, SGD, n=2, steps=1, slice_options={"executor": executor})


class AnotherModel(ts.TrainingCallback):
    """Uses the executor of a run for another model meanwhile."""

    def __init__(self, executor: DistributedExecutor) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        self.sliced = ts.slice(self.model, n=2, executor=executor)
        self.batch = torch.randn(4, 16), torch.randint(4, (4,))
        self.predicted: torch.Tensor | None = None

    def on_step_end(self, step: int, metrics: Any) -> None:
        self.predicted = self.sliced.predict([self.batch])
        with pytest.raises(ts.ConfigError, match="the executor runs another model"):
            self.sliced.train([self.batch], SGD, "cross_entropy", epochs=1, run_dir=False)


def test_another_model_is_not_taken_for_the_one_that_is_trained(hosting: DistributedExecutor) -> None:
    other = AnotherModel(hosting)
    got = train_case(MLP, SGD, n=2, steps=2, callbacks=[other], slice_options={"executor": hosting})
    assert_same_bits(got, train_case(MLP, SGD, n=2, steps=2))
    assert other.predicted is not None
    assert torch.equal(other.predicted, other.model(other.batch[0]))

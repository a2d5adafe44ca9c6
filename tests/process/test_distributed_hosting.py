"""P2P with the first stage on the driver's machine: the bits of local training, and inputs that stay here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchslicer as ts
from tests.support.cluster import TRANSPORTS, Peers, listening, travelling_by
from tests.support.driver import sliced_train, train_case
from tests.support.models import GPT_CASE, MLP, MOE, UNET, Case
from tests.support.nets_values import TwoInputs
from tests.support.oracle import ADAM, SGD, assert_same_bits
from torchslicer.cluster.links import Links
from torchslicer.discovery import StaticDiscovery
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.transport.frame import FrameKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def hosting(peers: Peers) -> Iterator[DistributedExecutor]:
    """An executor whose own process, already running, holds stage 0."""
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


def test_the_process_ends_with_the_executor_and_not_before(hosting: DistributedExecutor) -> None:
    [first] = [member for member in hosting.coordinator.live() if member.dialled is None]
    assert_exact(hosting, MLP, steps=1)
    assert [member for member in hosting.coordinator.live() if member.dialled is None] == [first]


class Traffic:
    """What the driver sends: by rank, kinds and bytes of frames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: dict[int, set[FrameKind]] = {}
        self.bytes: dict[int, int] = {}
        send = Links.send

        def watched(links: Links, rank: int, frames: Any, **options: Any) -> None:
            found = list(frames)
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
    traffic = Traffic(monkeypatch)
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


def test_a_list_that_is_too_short_is_refused_before_a_process_starts() -> None:
    with DistributedExecutor(StaticDiscovery(peers=["127.0.0.1:9"]), host_stage=0) as executor:
        with pytest.raises(
            ts.ConfigError, match="3 stages need 2 peers beside the one of this machine, the list has 1"
        ):
            train_case(MLP, SGD, n=3, steps=1, slice_options={"executor": executor})
        assert not executor.coordinator.live()


def test_the_end_of_its_own_process_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with listening(1) as peers, peers.driver(host_stage=0, host_threads=1) as executor:
        train_case(MLP, SGD, n=2, steps=1, slice_options={"executor": executor})
    assert "is gone" not in caplog.text

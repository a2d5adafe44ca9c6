"""What belongs to another run or to an older generation neither feeds a run nor changes it, whoever sends it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchslicer as ts
from tests.support.cluster import travelling_by
from tests.support.crew import SGD, Crew, assert_usable, fails, train
from tests.support.saboteur import GHOSTS, NUM_STAGES, Saboteur, batches, haunt, model_with
from torchslicer.cluster.hub import PLAIN, open_link
from torchslicer.cluster.messages import (
    Abort,
    Attach,
    BatchInfo,
    EndEpoch,
    Gather,
    Message,
    Number,
    Release,
    Scale,
    Step,
    WorkInfo,
)
from torchslicer.errors import TransportError, WorkerFailureError
from torchslicer.transport.frame import Frame, FrameKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]


class AfterStep(ts.TrainingCallback):
    """Does something once, when the first step is over."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_step_end(self, step: int, *_: Any) -> None:
        """Do it."""
        if step == 0:
            self.action()


def assert_unharmed(crew: Crew, model: torch.nn.Module, action: Callable[[], None] = lambda: None) -> None:
    """Fail unless a run in which *action* happens gives the bits of local training."""
    alone, data = copy.deepcopy(model), batches()
    got = train(crew, model, data, callbacks=[AfterStep(action)])
    want = ts.slice(alone, n=NUM_STAGES).train(data, SGD, "mse", epochs=1, run_dir=False, num_microbatches=2)
    assert got[0]["loss"] == want[0]["loss"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize(("ghosts", "transport"), [("old", "unix"), ("old", "tcp"), ("old", "grpc"), ("later", "unix")])
def test_frames_of_another_generation_are_dropped(crew: Crew, ghosts: str, transport: str) -> None:
    """Stage 1 and the coordinator send one before and after each of theirs, for the same place, with other content."""

    def haunt_inputs() -> None:
        run = crew.executor._run
        assert run is not None
        haunt(run._links, GHOSTS[ghosts])

    with travelling_by(crew.executor, transport):
        assert_unharmed(crew, model_with(Saboteur(ghosts, at=2)), haunt_inputs)


@pytest.mark.parametrize("transport", ["unix", "tcp", "grpc"])
def test_a_frame_of_another_run_is_refused(crew: Crew, transport: str) -> None:
    """Who is linked and sends such a frame cannot be believed anything else: the run ends, and says between whom."""
    before = crew.pids
    with travelling_by(crew.executor, transport), fails(WorkerFailureError) as caught:
        train(crew, model_with(Saboteur("foreign")))
    text = str(caught.value)
    assert text.startswith(("stage 0 on worker 'worker-0' (127.0.0.1:", "stage 2 on worker 'worker-2' (127.0.0.1:"))
    assert "the connection to stage 1 (worker 'worker-1') broke: " in text
    assert "is of another run" in text
    assert_usable(crew)
    assert crew.pids == before


def test_inputs_of_another_run_are_refused(crew: Crew) -> None:
    def haunt_inputs() -> None:
        run = crew.executor._run
        assert run is not None
        haunt(run._links, GHOSTS["foreign"])

    with fails(WorkerFailureError, r"stage \d on worker .*the connection to the coordinator broke: .*of another run"):
        train(crew, model_with(), callbacks=[AfterStep(haunt_inputs)])
    assert_usable(crew)


# Data connections


def connections(crew: Crew, *, run_id: str, generation: int) -> Iterator[Any]:
    """Connect to all data ports of all workers as if for a run, as each of its ranks, and send what might be taken."""
    for member in crew.executor.coordinator.live():
        for endpoint in member.hello.endpoints:
            for rank in (-1, 0, 1, 2):
                attach = Attach(run_id=run_id, generation=generation, rank=rank, secret="guessed")
                channel, _ = open_link(
                    [endpoint], member.hello.host, attach, node=member.node, transport=endpoint.transport,
                    protection=PLAIN, timeout_s=10.0,
                )  # fmt: skip
                frame = Frame.of_tensor(FrameKind.INPUT, torch.ones(2, 8), generation=generation, pass_index=2)
                with contextlib.suppress(TransportError):  # refused already: tensors of strangers are
                    channel.send(frame, timeout_s=5.0)
                yield channel


@pytest.fixture
def intruders() -> Iterator[list[Any]]:
    """Connections, which are closed afterwards."""
    held: list[Any] = []
    yield held
    for channel in held:
        channel.close(timeout_s=0)


@pytest.mark.parametrize(("run_id", "ahead"), [("another", 0), ("failures", -1), ("failures", 0)])
def test_a_connection_for_another_run_is_never_taken(crew: Crew, intruders: list[Any], run_id: str, ahead: int) -> None:
    """Of another run, of an old generation, and of this one with another secret."""

    def intrude() -> None:
        intruders.extend(connections(crew, run_id=run_id, generation=crew.executor._generation + ahead))

    assert_unharmed(crew, model_with(), intrude)
    assert len(intruders) == 3 * 3 * 4
    assert_usable(crew)


def test_a_connection_without_the_secret_that_comes_before_the_others_is_not_taken(
    crew: Crew, intruders: list[Any]
) -> None:
    intruders.extend(connections(crew, run_id="failures", generation=crew.executor._generation + 1))
    assert_unharmed(crew, model_with())


# Control messages


def test_commands_of_an_old_generation_are_ignored(crew: Crew) -> None:
    assert_usable(crew)
    old = crew.executor._generation
    batch = BatchInfo(pass_index=1, works=[WorkInfo(share=1.0, aux_share=1.0, key=0)])
    commands: list[Message] = [
        Step(generation=old, step=1, batches=[batch]),
        EndEpoch(generation=old, metrics={"loss": 0.0}),
        Scale(generation=old, step=1, coefficient=Number(value=0.0)),
        Gather(generation=old),
        Abort(generation=old, reason="late"),
        Release(generation=old),
    ]

    def say() -> None:
        for member in crew.executor.coordinator.live():
            for command in commands:
                member.control.send(command)

    assert_unharmed(crew, model_with(), say)
    assert_usable(crew)

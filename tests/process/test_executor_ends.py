"""An executor that ends early: while it is made, or in the middle of a run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import torchslicer as ts
from tests.support.cluster import free_address
from tests.support.crew import SGD, Crew, assert_usable, executor_at, train
from tests.support.saboteur import batches, model_with
from torchslicer.discovery import CoordinatorDiscovery, StaticDiscovery
from torchslicer.errors import RunError
from torchslicer.executors import distributed
from torchslicer.executors.distributed import DistributedExecutor

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "arguments", [{"discovery": CoordinatorDiscovery()}, {"discovery": StaticDiscovery(peers=["x:1"]), "host_stage": 0}]
)
def test_control_c_while_an_executor_is_made_leaves_nothing(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    threads, address = set(threading.enumerate()), free_address()
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "_import_ahead", interrupted)
        with pytest.raises(KeyboardInterrupt):
            DistributedExecutor(coordinator_addr=address, **arguments)
    assert set(threading.enumerate()) == threads
    with DistributedExecutor(coordinator_addr=address):  # the port is free
        pass


class Ends(ts.TrainingCallback):
    """Ends the executor after the first step."""

    def __init__(self, executor: Any, how: str) -> None:
        self.end = getattr(executor, how)

    def on_step_end(self, step: int, *_: Any) -> None:
        """Do it."""
        if step == 0:
            self.end()


@pytest.mark.parametrize("how", ["close", "teardown"])
def test_an_executor_that_a_callback_ends_says_so(crew: Crew, how: str) -> None:
    with pytest.raises(RunError, match="no run is in progress any more; was the executor closed or torn down"):
        train(crew, model_with(), batches(), callbacks=[Ends(crew.executor, how)])
    if how == "close":
        crew.executor = executor_at(crew.address)
    crew.wait_for()
    assert_usable(crew)


def test_a_local_executor_that_a_callback_ends_says_so() -> None:
    sliced = ts.slice(model_with(), n=2)
    with pytest.raises(RunError, match="no run is in progress any more"):
        sliced.train(batches(), SGD, "mse", epochs=1, run_dir=False, callbacks=[Ends(sliced.executor, "teardown")])

"""The programs of `examples/train`, as the README there says to run them, from another folder."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Program
from torchslicer.config import RunConfig

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples" / "train"
SHORT = ["--steps", "3", "--batch-size", "8"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def example(name: str, *arguments: str, folder: Path) -> Program:
    return Program([str(EXAMPLES / name), *arguments], cwd=folder)


def losses(program: Program) -> list[str]:
    """Return what a program says of its epochs, once it has ended well."""
    assert program.wait(timeout_s=110) == 0, program.output
    found = re.findall(r"^epoch \d+: loss (\S+)", program.output, re.MULTILINE)
    assert found, program.output
    return found


@contextlib.contextmanager
def workers(count: int, *options: str, folder: Path) -> Iterator[list[Program]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                example("worker.py", *options, "--name", f"worker-{index}", "--threads", "1", folder=folder)
            )
            for index in range(count)
        ]


@pytest.mark.parametrize("path", sorted((EXAMPLES / "experiments").iterdir()), ids=lambda path: path.name)
def test_experiments_load(path):
    config = RunConfig.load(path)
    assert config.training.optimizer["params"]
    assert config.pipeline.schedule in ("gpipe", "1f1b")


def test_coordinator_and_two_workers_give_the_loss_of_one_process(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    experiment = str(EXAMPLES / "experiments" / "gpt_4workers_1f1b.yaml")
    with workers(2, "--coordinator", address, "--once", folder=tmp_path) as started:
        with example("local.py", experiment, "--threads", "1", *SHORT, folder=tmp_path) as local:
            expected = losses(local)
        options = ["--workers", "2", "--bind", address, *SHORT]
        with example("coordinator.py", experiment, *options, folder=tmp_path) as coordinator:
            assert losses(coordinator) == expected
        assert [worker.wait(timeout_s=30) for worker in started] == [0, 0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resnet_trains_here_and_on_two_workers(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    experiment = str(EXAMPLES / "experiments" / "resnet18_2workers.yaml")
    short = ["--model", "resnet18", "--steps", "2", "--batch-size", "4"]
    with workers(2, "--coordinator", address, "--once", folder=tmp_path):
        with example("local.py", experiment, "--threads", "1", *short, folder=tmp_path) as local:
            expected = losses(local)
        with example("coordinator.py", experiment, *short, "--bind", address, folder=tmp_path) as coordinator:
            assert losses(coordinator) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_peers_and_a_driver_give_the_loss_of_one_process(tmp_path):
    experiment = str(EXAMPLES / "experiments" / "p2p.yaml")
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(started)
            for started in (
                example("worker.py", "--listen", "127.0.0.1:0", "--threads", "1", "--once", folder=tmp_path)
                for _ in range(2)
            )
        )
        addresses = [peer.wait_for(r"listening for a driver on (\S+)")[1] for peer in (first, second)]
        local = stack.enter_context(example("local.py", experiment, "--threads", "1", *SHORT, folder=tmp_path))
        options = ["--peers", ",".join(addresses), "--threads", "1", *SHORT]
        driver = stack.enter_context(example("p2p.py", experiment, *options, folder=tmp_path))
        assert losses(driver) == losses(local)
        assert [peer.wait(timeout_s=30) for peer in (first, second)] == [0, 0]

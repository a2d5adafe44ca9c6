"""``ts.simulate``, ``torchslicer demo --mode simulate`` and ``torchslicer selftest``: workers started for the user."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchslicer as ts
from tests.support.cluster import Program, free_address, worker_program, write_script
from tests.support.models import MLP, mlp4
from tests.support.oracle import SGD
from tests.support.saboteur import Saboteur, batches, model_with
from torchslicer import simulation
from torchslicer.executors import processes
from torchslicer.executors.distributed import DistributedExecutor

pytestmark = pytest.mark.process

MODULE = """
import torch
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if bool(x.sum() < -1e9):  # no tracer can enter this module, so the worker needs the class
            return x
        return x + torch.tanh(self.linear(x))
"""
SCRIPT = """
import copy, torch, torchslicer as ts
from torch import nn
from my_layers import Residual

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(Residual(), nn.Dropout(0.1), Residual(), nn.Linear(16, 4))
twin = copy.deepcopy(model)
batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(3)]
options = dict(epochs=2, num_microbatches=2, run_dir=False)
there = ts.simulate(model, batches, {"name": "SGD", "params": {"lr": 0.1}}, "cross_entropy", n=2, threads=1, **options)
here = ts.slice(twin, n=2).train(batches, {"name": "SGD", "params": {"lr": 0.1}}, "cross_entropy", **options)
same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values()))
print("same", same and [r["loss"] for r in here] == [r["loss"] for r in there])
"""


def test_a_script_without_a_guard_and_with_a_module_of_its_own(tmp_path: Path) -> None:
    """The workers are told where the script imports from, and trust the packages of the model's classes."""
    (tmp_path / "code").mkdir()
    write_script(tmp_path / "code", MODULE, "my_layers.py")
    script = write_script(tmp_path / "code", SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    with Program([script], cwd=tmp_path / "elsewhere") as program:
        assert program.wait(timeout_s=100.0) == 0, program.output
        assert program.lines == ["same True"]


def test_what_is_wrong_with_the_cut_is_said_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        pytest.fail("processes were started")

    monkeypatch.setattr(simulation, "LocalWorkers", start)
    with pytest.raises(ts.SliceError, match="99"):
        ts.simulate(mlp4(), MLP.batches(1), SGD, "cross_entropy", n=99, run_dir=False)
    with pytest.raises(ts.ConfigError, match="at least one worker"), simulation.simulated(0):
        pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"threads": 0}, "threads: expected a whole number above 0, got 0"),
        ({"threads": "x"}, "threads: expected a whole number above 0, got 'x'"),
        ({"threads": True}, "threads: expected a whole number above 0, got True"),
        ({"transport": "unix"}, "transport: expected 'grpc' or 'tcp', got 'unix'"),
        ({"trust": "my_package"}, r"trust: expected a list of texts such as \['my_package'\], got 'my_package'"),
        ({"allow_builder": "my_package:make"}, "allow_builder: expected a list of texts"),
        ({"n": "2"}, "n: expected a whole number, got '2'"),
    ],
)
def test_arguments_of_another_kind_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ts.ConfigError, match=f"^{says}"):
        ts.simulate(mlp4(), MLP.batches(1), SGD, "cross_entropy", run_dir=False, **given)
    with pytest.raises(ts.ConfigError, match=f"^{says}"), simulation.simulated(**{"n": 2, **given}):
        pass


def test_more_stages_than_workers_that_can_come_are_refused_at_once(pool: DistributedExecutor) -> None:
    sliced = ts.slice(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), n=5, executor=pool)
    with pytest.raises(ts.ConfigError, match="5 stages need 5 workers, and only 4 were started"):
        sliced.train([(torch.ones(2, 4), torch.ones(2, 4))], SGD, "mse", epochs=1, run_dir=False)


def test_errors_name_the_process_of_a_worker_that_has_no_address(pool: DistributedExecutor) -> None:
    """It came through a UNIX socket, whose path (a folder with a random name) is of no use to anybody."""
    sliced = ts.slice(model_with(Saboteur("raise")), n=3, executor=pool)
    with pytest.raises(
        ts.StageError, match=r"^stage 1 on worker 'worker-\d+' \(process \d+ of this host\): "
    ) as caught:
        sliced.train(batches(), SGD, "mse", epochs=1, run_dir=False, num_microbatches=2)
    message = str(caught.value)
    assert "unix:" not in message.partition("Traceback")[0]
    found = re.search(r"'(worker-\d+)' \(process (\d+) of", message)
    assert found is not None
    assert f"--name\0{found[1]}\0".encode() in Path(f"/proc/{found[2]}/cmdline").read_bytes()


def test_trust_follows_from_the_model() -> None:
    criterion = nn.CrossEntropyLoss()
    assert simulation._packages(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), criterion) == []
    assert simulation._packages(nn.Sequential(nn.Linear(2, 2)), test_trust_follows_from_the_model) == ["tests"]
    assert simulation._packages(mlp4(), torch.nn.functional.mse_loss) == []


def cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``torchslicer`` with one thread."""
    command = [sys.executable, "-m", "torchslicer.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_with_worker_processes(tmp_path: Path) -> None:
    done = cli(tmp_path, "demo", "--mode", "simulate", "--epochs", "1", "--schedule", "1f1b")
    assert done.returncode == 0, done.stderr
    assert "3 processes of this machine" in done.stdout
    assert "largest difference  0," in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_selftest_starts_workers(tmp_path: Path) -> None:
    done = cli(tmp_path, "selftest", "-n", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": exact") == 6
    assert len(re.findall(r"^link .*: \d+ MiB/s, round trip of 1 KiB [\d.]+ ms$", done.stdout, re.MULTILINE)) == 5
    assert done.stdout.endswith("passed\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_selftest_uses_the_users_workers() -> None:
    address = free_address()
    options = ["--coordinator", address, "--once"]
    with (
        worker_program("--name", "left", *options) as left,
        worker_program("--name", "right", *options) as right,
        Program(["-m", "torchslicer.cli", "selftest", "--coordinator", address, "-n", "2"]) as program,
    ):
        assert program.wait(timeout_s=200.0) == 0, program.output
        assert "workers   left, right" in program.lines
        assert program.lines[-1].startswith("passed")
        assert left.wait() == 0
        assert right.wait() == 0


def test_settings_in_the_environment_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TORCHSLICER_NETWORK__TLS__CA": "ca.pem", "TORCHSLICER_JOIN": "ts1.x", "EXPERIMENT_CONFIG": "run.yaml"}
    for name, value in {**given, "WORKER_ADDRESS": "elsewhere", "MINE": "kept"}.items():
        monkeypatch.setenv(name, value)
    passed = processes._environment()
    assert passed["MINE"] == "kept"
    assert not {*given, "WORKER_ADDRESS"} & set(passed)

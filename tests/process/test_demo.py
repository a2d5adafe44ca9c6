"""The demo as users see it: a process of its own, its output in a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchslicer.runlog import read_metrics

pytestmark = pytest.mark.process


def demo(folder: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchslicer.cli", "demo", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_the_demo_runs_in_a_pipe(tmp_path: Path) -> None:
    done = demo(tmp_path, "--epochs", "1", "--n", "2", "--schedule", "1f1b", "--microbatches", "2", timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert "2 stages by 'time'" in done.stdout
    assert "rank 1 | " in done.stdout
    assert "largest difference  0," in done.stdout
    assert "\r" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert re.search(r"^epoch 1/1  loss .* samples/s", done.stderr, re.MULTILINE)
    found = re.search(r"^run folder +(.+)$", done.stdout, re.MULTILINE)
    assert found is not None
    records = list(read_metrics(tmp_path / found[1] / "metrics.jsonl"))
    assert records[-1]["status"] == "completed"


def test_an_error_is_one_line_and_its_exit_code(tmp_path: Path) -> None:
    done = demo(tmp_path, "--n", "99", timeout_s=110)
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arguments", [(), ("--schedule", "plain", "--n", "4", "--seed", "1")])
def test_the_demo_learns_and_equals_the_unsliced_training(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = demo(tmp_path, *arguments, timeout_s=580)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"^test accuracy +([\d.]+)%", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) >= 97.0
    assert "largest difference  0," in done.stdout

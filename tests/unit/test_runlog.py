"""The run log: real files, right values, torn lines, full disks."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchslicer.errors import DataError
from torchslicer.events import EpochEnded, EpochStarted, Evaluated, EventBus, RunEnded, RunStarted, StepEnded
from torchslicer.runlog import RunLog, read_metrics

NOON = datetime(2026, 1, 2, 12, 0, 0, 5, tzinfo=timezone.utc)
HEAD = {"schema": 1, "time": "2026-01-02T12:00:00.000005+00:00"}


def step(number: int, loss: float = 0.1) -> StepEnded:
    return StepEnded(step=number, epoch=1, loss=loss, samples=8, duration_s=0.25, lr=1e-3, grad_norm=2.5)


def write_steps(folder: Path, *numbers: int) -> Path:
    with RunLog(folder, now=lambda: NOON) as log:
        for number in numbers:
            log.on_event(step(number))
    return log.path


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_a_run_as_records(tmp_path: Path) -> None:
    with RunLog(tmp_path / "runs" / "r", now=lambda: NOON) as log:
        bus = EventBus([log])
        bus.emit(RunStarted(run_id="inf", epochs=1, num_stages=2, num_microbatches=4, schedule="1f1b"))
        bus.emit(EpochStarted(epoch=1))
        bus.emit(step(0, loss=0.1 + 0.2))
        bus.emit(EpochEnded(epoch=1, loss=0.5, samples=8, duration_s=1.0, samples_per_s=8.0, lr=1e-3))
        bus.emit(Evaluated(epoch=1, samples=4, duration_s=0.5, metrics={"accuracy": 0.75, "ratio": math.inf}))
        bus.emit(RunEnded(status="completed", epochs=1, steps=1, duration_s=2.0))
    path = tmp_path / "runs" / "r" / "metrics.jsonl"
    records = read_metrics(path)
    assert records == read_metrics(path.parent)
    assert [(record["type"], record.get("status")) for record in records] == [
        ("run", "started"),
        ("step", None),
        ("epoch", None),
        ("evaluation", None),
        ("run", "completed"),
    ]
    assert records[0]["run_id"] == "inf"
    assert records[1] == HEAD | {
        "type": "step",
        "step": 0,
        "epoch": 1,
        "loss": 0.30000000000000004,
        "samples": 8,
        "duration_s": 0.25,
        "lr": 1e-3,
        "grad_norm": 2.5,
    }
    assert records[3]["metrics"] == {"accuracy": 0.75, "ratio": math.inf}
    assert records[4]["error"] is None
    assert list(json.loads(path.read_text().splitlines()[1]))[:3] == ["schema", "type", "time"]


def test_non_finite_losses_are_valid_json_and_floats_again(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for number, loss in enumerate([math.nan, math.inf, -math.inf]):
            log.on_event(step(number, loss))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in log.path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == ["nan", "inf", "-inf"]
    losses = [record["loss"] for record in read_metrics(log.path)]
    assert math.isnan(losses[0])
    assert losses[1:] == [math.inf, -math.inf]


@given(loss=st.floats())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_float_comes_back_exactly(loss: float, tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.on_event(step(0, loss))
    read = read_metrics(log.path)[-1]["loss"]
    assert read == loss or (math.isnan(read) and math.isnan(loss))
    assert math.copysign(1, read) == math.copysign(1, loss) or math.isnan(loss)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write({"type": "evaluation", "metrics": {"a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan")}})
        with pytest.raises(TypeError, match="got set"):
            log.write({"type": "evaluation", "metrics": {"a": {1}}})
    metrics = read_metrics(log.path)[0]["metrics"]
    assert (metrics["a"], metrics["b"]) == (0.5, 3)
    assert math.isnan(metrics["c"])


def test_time_is_utc(tmp_path: Path) -> None:
    write = RunLog(tmp_path)
    write.on_event(step(0))
    write.close()
    time = datetime.fromisoformat(read_metrics(write.path)[0]["time"])
    assert time.utcoffset() is not None
    assert abs((datetime.now(timezone.utc) - time).total_seconds()) < 60


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with RunLog(tmp_path / "run") as log:
            log.write_config("a: 1\n")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [log.directory, *log.directory.iterdir()]}
    assert modes == {"run": 0o700, "metrics.jsonl": 0o600, "resolved_config.yaml": 0o600}
    assert (log.directory / "resolved_config.yaml").read_text() == "a: 1\n"


def test_each_record_is_one_write_and_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    real = os.write

    def counting(file: int, data: bytes) -> int:
        writes.append(data)
        return real(file, data)

    monkeypatch.setattr(os, "write", counting)
    with RunLog(tmp_path) as log:
        log.on_event(step(0))
        assert steps_in(log.path) == [0]
        log.on_event(step(1))
    assert len(writes) == 2
    assert b"".join(writes) == log.path.read_bytes()


def test_a_log_is_continued(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 1)
    assert steps_in(write_steps(tmp_path, 2)) == [0, 1, 2]


def test_a_torn_last_line_is_skipped_and_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    path = write_steps(tmp_path, 0, 1)
    path.write_bytes(path.read_bytes()[:-7])
    assert steps_in(path) == [0]
    assert steps_in(write_steps(tmp_path, 2)) == [0, 2]


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 20_000])
def test_a_torn_line_of_any_length_is_removed(length: int, tmp_path: Path) -> None:
    path = write_steps(tmp_path, 0)
    with path.open("ab") as file:
        file.write(b"x" * length)
    assert steps_in(write_steps(tmp_path, 1)) == [0, 1]


def test_a_file_that_is_one_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"schema"')
    assert read_metrics(tmp_path) == []
    assert steps_in(write_steps(tmp_path, 3)) == [3]


@pytest.mark.parametrize("cut", range(0, 200, 23))
def test_reading_never_fails_wherever_the_last_line_is_torn(cut: int, tmp_path: Path) -> None:
    path = write_steps(tmp_path, 0, 1)
    first = path.read_bytes().index(b"\n") + 1
    path.write_bytes(path.read_bytes()[: first + cut])
    assert steps_in(path) in ([0], [0, 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"schema": 1, "ty', "line 2: expected a JSON object, found a torn or foreign line"),
        (b"", "line 2: expected a JSON object"),
        (b"[1]", "line 2: expected a JSON object"),
        (b"\xff\xfe", "line 2: expected a JSON object"),
        (b'{"schema": 2}', "line 2: expected schema version 1, got 2"),
        (b"{}", "line 2: expected schema version 1, got None"),
    ],
)
def test_a_bad_line_elsewhere_is_an_error_with_its_number(line: bytes, message: str, tmp_path: Path) -> None:
    path = write_steps(tmp_path, 0, 1)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, lines[1], b""]))
    with pytest.raises(DataError, match=message):
        read_metrics(path)


def test_a_missing_log_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "none.jsonl")


def test_an_unusable_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunLog(tmp_path / "file" / "run")


def test_a_full_disk_costs_log_lines_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.INFO, logger="torchslicer"), RunLog(tmp_path) as log:
        log.on_event(step(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            log.on_event(step(1))
            log.on_event(step(2))
        log.on_event(step(3))
    assert steps_in(log.path) == [0, 3]
    assert log.dropped == 2
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("torchslicer.runlog", "WARNING"),
        ("torchslicer.runlog", "INFO"),
    ]
    assert "No space left on device" in caplog.messages[0]
    assert "2 records" in caplog.messages[1]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file grow beyond 300 bytes: the kernel then writes a piece, as on a disk that gets full."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_piece_of_a_record_that_did_not_fit_is_removed(tmp_path: Path, small_files: None) -> None:
    with RunLog(tmp_path) as log:
        for number in range(5):
            log.on_event(step(number))
        size = log.path.stat().st_size
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
        log.on_event(step(9))
    assert size < 300
    assert log.dropped == 4
    assert log.path.read_bytes().endswith(b"\n")
    assert steps_in(log.path) == [0, 9]


def test_a_full_disk_at_the_start_and_for_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    with RunLog(tmp_path) as log:
        log.write_config("a: 1\n")
        log.on_event(step(0))
    assert log.dropped == 1
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]
    assert list(tmp_path.iterdir()) == []


def test_records_after_closing_are_dropped(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.close()
    log.close()
    log.on_event(step(0))
    assert (log.dropped, read_metrics(log.path)) == (1, [])


@pytest.mark.process
def test_a_killed_process_loses_nothing_it_had_written(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from torchslicer.runlog import RunLog\n"
        "log = RunLog(sys.argv[1])\n"
        "for number in range(50):\n"
        "    log.write({'type': 'step', 'step': number})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert steps_in(tmp_path) == list(range(50))

"""Fails a test that leaves something behind, and takes it away so that the next test starts clean.

Watched: threads, child processes, sockets, environment variables, the working directory and PyTorch's global switches.
A snapshot is taken before any other fixture of the test, and compared after the last of them is gone. What module and
session fixtures made is in the snapshot, so it is not the test's leak.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# How long something that is already ending (a thread past its last line, a killed process) may take to be gone.
GRACE_S = 0.5

# Set while a test runs by the tools themselves, not by the test.
_TOOL_VARIABLES = {
    "PYTEST_CURRENT_TEST",  # pytest, for every phase of a test
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn, when it is first imported
    "KMP_INIT_AT_FORK",  # the same
    "TORCHINDUCTOR_CACHE_DIR",  # torch.export and torch.compile, when first used
    "TRITON_CACHE_DIR",  # the same
}
# Helper processes that Python keeps for the life of the interpreter.
_PYTHON_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
# The one thread that tqdm keeps for all bars of the process, and stops at exit.
_TOOL_THREADS = ("TMonitor",)

LATE_THREADS: set[str] = set()
"""Names of threads that a fixture of many tests may start while one of them runs, and ends itself."""


@dataclass(frozen=True)
class Snapshot:
    """What exists at one moment, by kind."""

    threads: dict[int, str]
    processes: dict[int, str]
    sockets: dict[int, str]
    environment: dict[str, str]
    folder: str
    torch_state: dict[str, Any]


def take() -> Snapshot:
    """Look at this process."""
    return Snapshot(
        threads=_threads(),
        processes=_processes(),
        sockets=_sockets(),
        environment={key: value for key, value in os.environ.items() if key not in _TOOL_VARIABLES},
        folder=str(Path.cwd()),
        torch_state=_torch_state(),
    )


def leaks(before: Snapshot, after: Snapshot) -> list[str]:
    """Describe what *after* has and *before* has not, one line each."""
    found = [
        *(f"thread {name!r} is still running" for ident, name in after.threads.items() if ident not in before.threads),
        *(
            f"child process {pid} ({name}) is alive"
            for pid, name in after.processes.items()
            if pid not in before.processes
        ),
        *(f"{name} is still open" for inode, name in after.sockets.items() if inode not in before.sockets),
        *_changes("environment variable", before.environment, after.environment),
    ]
    if before.folder != after.folder:
        found.append(f"working directory changed from {before.folder} to {after.folder}")
    if before.torch_state and after.torch_state:
        found += _changes("torch", before.torch_state, after.torch_state)
    return found


def restore(before: Snapshot) -> None:
    """Put back what can be put back, so that one bad test does not make others fail."""
    for key in set(os.environ) - set(before.environment) - _TOOL_VARIABLES:
        del os.environ[key]
    os.environ.update(before.environment)
    os.chdir(before.folder)
    for name, value in before.torch_state.items():
        _TORCH_SWITCHES[name][1](value)


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    """Fail the test if it leaves threads, processes, sockets or changed global state."""
    before = take()
    yield
    found = leaks(before, take())
    if found:
        gc.collect()  # what only waits for the collector is no leak
        found = _after_grace(before)
    if found:
        restore(before)
        pytest.fail("the test left something behind:\n  " + "\n  ".join(found), pytrace=False)


def _after_grace(before: Snapshot) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    while found := leaks(before, take()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return found


def _changes(kind: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    missing = "(unset)"
    return [
        f"{kind} {key} changed from {before.get(key, missing)!r} to {after.get(key, missing)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, missing) != after.get(key, missing)
    ]


def _threads() -> dict[int, str]:
    return {
        id(thread): thread.name
        for thread in threading.enumerate()
        # Dummies are threads of C++ code (autograd's) that once called Python; PyTorch keeps them.
        if not isinstance(thread, threading._DummyThread)
        and type(thread).__name__ not in _TOOL_THREADS
        and thread.name not in LATE_THREADS
    }


def _processes() -> dict[int, str]:
    pids = {int(pid) for pid in _child_pids()}
    pids |= {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    return {pid: name for pid in pids if (name := _process_name(pid))}


def _child_pids() -> list[str]:
    found: list[str] = []
    for task in _entries("/proc/self/task"):
        try:
            found += Path(f"/proc/self/task/{task}/children").read_text(encoding="ascii").split()
        except OSError:  # the thread has just ended, or the kernel was built without this file
            continue
    return found


def _process_name(pid: int) -> str:
    """Return the command of a living child; nothing for one that has ended, or is Python's own helper."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "" if Path("/proc/self").exists() else "unknown"
    if state in "ZX" or any(helper in command for helper in _PYTHON_HELPERS):
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace").strip()[:80] or "just started"


def _sockets() -> dict[int, str]:
    found = {}
    for number in _entries("/proc/self/fd"):
        try:
            target = str(Path(f"/proc/self/fd/{number}").readlink())
        except OSError:  # the listing's own descriptor
            continue
        if target.startswith("socket:["):
            found[int(target[8:-1])] = f"socket (descriptor {number})"
    return found


def _entries(folder: str) -> list[str]:
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:  # not Linux
        return []


def _torch_state() -> dict[str, Any]:
    if "torch" not in sys.modules:
        return {}
    return {name: get() for name, (get, _) in _TORCH_SWITCHES.items()}


def _torch() -> Any:
    return sys.modules["torch"]


def _set_deterministic(value: tuple[bool, bool]) -> None:
    _torch().use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_cudnn(value: tuple[bool, bool]) -> None:
    _torch().backends.cudnn.deterministic, _torch().backends.cudnn.benchmark = value


_TORCH_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (lambda: _torch().get_default_dtype(), lambda value: _torch().set_default_dtype(value)),
    "grad mode": (lambda: _torch().is_grad_enabled(), lambda value: _torch().set_grad_enabled(value)),
    "number of threads": (lambda: _torch().get_num_threads(), lambda value: _torch().set_num_threads(value)),
    "deterministic algorithms": (
        lambda: (
            _torch().are_deterministic_algorithms_enabled(),
            _torch().is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    "cudnn (deterministic, benchmark)": (
        lambda: (_torch().backends.cudnn.deterministic, _torch().backends.cudnn.benchmark),
        _set_cudnn,
    ),
    "CPU autocast": (
        lambda: _torch().is_autocast_enabled("cpu"),
        lambda value: _torch().set_autocast_enabled("cpu", value),
    ),
    "anomaly detection": (
        lambda: _torch().is_anomaly_enabled(),
        lambda value: _torch().autograd.set_detect_anomaly(mode=value),
    ),
}

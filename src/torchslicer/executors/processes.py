"""Worker processes on this machine: started, watched and stopped for the user."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import Self

from torchslicer.config.environment import is_setting
from torchslicer.errors import WorkerFailureError

_FAREWELL = "stop\n"
"""Said before standard input is closed, so that workers know that this process was not killed."""
_STOP_TIMEOUT_S = 10.0
_KEPT_LINES = 50
_SHOWN_LINES = 5
_POLL_S = 0.02


class LocalWorkers:
    """Worker processes on this machine, connected to one coordinator.

    They end with the ``with`` block, and also when this process dies: their standard input is then closed. Ctrl-C in
    a terminal reaches only this process, which then stops them.

    Args:
        address: ``HOST:PORT`` of the coordinator.
        names: Names of the workers; as many are started.
        threads: Threads of torch in each; by default the cores are shared.
        trust: Packages that models may use.
        allow_builder: Functions that may be called to build models.
        device: Where they compute.
        options: Further options of ``torchslicer worker``.
        folder: A folder of this process for their sockets. Whoever made it removes it after them; when this process
            is killed, they do.
    """

    def __init__(
        self,
        address: str,
        names: Sequence[str],
        *,
        threads: int | None = None,
        trust: Sequence[str] = (),
        allow_builder: Sequence[str] = (),
        device: str = "cpu",
        options: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self.names = tuple(names)
        self.trust = tuple(trust)
        self.allow_builder = tuple(allow_builder)
        options = ["--coordinator", address, "--device", device, *options]
        options += ["--log-level", "WARNING", "--exit-with-stdin", "--once"]
        options += ["--threads", str(threads)] if threads else []
        options += ["--owned-folder", str(folder)] if folder is not None else []
        options += [part for package in trust for part in ("--trust", package)]
        options += [part for builder in allow_builder for part in ("--allow-builder", builder)]
        self._processes: list[subprocess.Popen[str]] = []
        self._said: dict[str, deque[str]] = {name: deque(maxlen=_KEPT_LINES) for name in self.names}
        self._threads: list[threading.Thread] = []
        try:
            for name in self.names:
                self._start(name, options)
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str, options: Sequence[str]) -> None:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "torchslicer.cli", "worker", "--name", name, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=_environment(),
            start_new_session=True,
        )
        self._processes.append(process)
        thread = threading.Thread(target=self._listen, args=(name, process), name="torchslicer-worker-log", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ValueError):  # closed by `stop`
            for line in process.stderr or ():
                self._said[name].append(line.rstrip())

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(process.pid for process in self._processes)

    def last_words(self) -> str:
        """Return what the workers last wrote to stderr, for messages."""
        return "\n".join(f"{name}: {line}" for name in self.names for line in list(self._said[name])[-_SHOWN_LINES:])

    def wait_for(self, registered: Callable[[], int], *, timeout_s: float) -> None:
        """Wait until as many workers have *registered* as were started.

        Raises:
            WorkerFailureError: One of them ended, or they took too long; the message holds their last words.
        """
        deadline = time.monotonic() + timeout_s
        while registered() < len(self.names):
            for name, process in zip(self.names, self._processes, strict=True):
                if process.poll() is not None:
                    self._threads[self.names.index(name)].join(timeout=1.0)
                    raise WorkerFailureError(
                        f"{name} ended at its start with exit code {process.returncode}{self._quoted()}"
                    )
            if time.monotonic() > deadline:
                raise WorkerFailureError(
                    f"of {len(self.names)} workers {registered()} registered within {timeout_s:.0f} s{self._quoted()}"
                )
            time.sleep(_POLL_S)

    def _quoted(self) -> str:
        words = self.last_words()
        return f"; the last words of the workers:\n{words}" if words else "; no worker said anything"

    def stop(self) -> None:
        """End the workers: politely, then firmly."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                if process.stdin is not None and not process.stdin.closed:
                    process.stdin.write(_FAREWELL)
                    process.stdin.close()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)
        for thread in self._threads:
            thread.join(timeout=1.0)
        for process in self._processes:
            if process.stderr is not None:
                process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _environment() -> dict[str, str]:
    """Return this process's environment, with its import path: what can be imported here can be imported there.

    Settings of this process are left out: the workers are told by options what concerns them.
    """
    folders = [str(Path(entry or ".").resolve()) for entry in sys.path if Path(entry or ".").is_dir()]
    inherited = {name: value for name, value in os.environ.items() if not is_setting(name)}  # noqa: TID251 - handed on
    return {**inherited, "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}

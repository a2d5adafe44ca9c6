"""Keeps workers running, as systemd or Kubernetes would: ``python -m tests.support.supervisor ADDRESS NAME...``

Says ``NAME PID`` when it starts one, and passes on what they write. Ends them, and itself, when its standard input ends.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

_PAUSE_S = 0.2


def keep(address: str, name: str, over: threading.Event) -> None:
    """Run a worker, again and again."""
    command = [sys.executable, "-u", "-m", "torchslicer.cli", "worker", "--threads", "1", "--trust", "tests"]
    while not over.is_set():
        with subprocess.Popen([*command, "--coordinator", address, "--name", name, "--exit-with-stdin"], stdin=-1) as process:
            print(name, process.pid, flush=True)
            while process.poll() is None and not over.is_set():
                time.sleep(0.05)
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            status = process.wait()
        print(name, "ended", status, flush=True)
        over.wait(_PAUSE_S)


def main() -> None:
    """Keep all workers running."""
    over = threading.Event()
    address, *names = sys.argv[1:]
    threads = [threading.Thread(target=keep, args=(address, name, over)) for name in names]
    for thread in threads:
        thread.start()
    while sys.stdin.buffer.read(1):
        pass
    over.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()

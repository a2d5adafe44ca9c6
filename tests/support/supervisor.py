"""Keeps workers running, as systemd or Kubernetes would: ``python -m tests.support.supervisor ADDRESS NAME...``

Says ``NAME PID`` when it starts one, and passes on what they write. Ends with its standard input, and ends them.
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
    command += ["--coordinator", address, "--name", name, "--exit-with-stdin"]
    while not over.is_set():
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            say(name, process.pid)
            while process.poll() is None and not over.is_set():
                time.sleep(0.05)
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            status = process.wait()
        say(name, "ended", status)
        over.wait(_PAUSE_S)


def say(*words: object) -> None:
    """Write a line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


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

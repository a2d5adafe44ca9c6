"""``torchslicer worker``: offer this machine to a coordinator, or wait for a P2P driver."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from pathlib import Path

import click

_MAX_JOIN_BYTES = 1024
_OWNER_TIMEOUT_S = 5.0


@click.command()
@click.option("--coordinator", metavar="HOST:PORT", help="Where the coordinator is; it may start later.")
@click.option("--listen", metavar="HOST:PORT", help="P2P: wait here for a driver instead.")
@click.option("--config", type=click.Path(dir_okay=False), help="A YAML file with settings; options go before it.")
@click.option("--bind", metavar="HOST:PORT", help="Where to take data connections.")
@click.option(
    "--data-port", metavar="PORT|FIRST-LAST", help="Ports for data: TCP and, the next one, gRPC (default: free)."
)
@click.option("--advertise", metavar="HOST", help="Host that others are told to connect to.")
@click.option("--device", default=None, help="auto, cpu, cuda:0 ... (default: auto)")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch (default: the host's cores, shared).")
@click.option("--tags", default="", help="Comma-separated; a coordinator may ask for them.")
@click.option("--name", help="Name of the worker; stages are given out in the order of names.")
@click.option("--trust", multiple=True, metavar="PACKAGE", help="A package whose classes models may use; repeatable.")
@click.option(
    "--allow-builder",
    multiple=True,
    metavar="PKG.MOD:FUNCTION",
    help="A function that may build models here, or a package of them; repeatable.",
)
@click.option(
    "--join", metavar="STRING", help="The join string that the coordinator has printed; - reads it from stdin."
)
@click.option("--join-file", type=click.Path(dir_okay=False), help="A file of mode 0600 with the join string.")
@click.option("--tls-ca", type=click.Path(dir_okay=False), help="Certificate of the authority (PEM).")
@click.option("--tls-cert", type=click.Path(dir_okay=False), help="Certificate of this worker (PEM).")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="Key of this worker (PEM, mode 0600).")
@click.option("--tls-name", "tls_names", multiple=True, metavar="NAME", help="A name that peers may have; repeatable.")
@click.option("--insecure", is_flag=True, help="Allow plain text off loopback; needs TS_INSECURE=1 as well.")
@click.option("--once", is_flag=True, help="End when the first coordinator is gone.")
@click.option("--log-level", default="INFO", show_default=True, help="What to log to stderr.")
@click.option("--exit-with-stdin", is_flag=True, hidden=True, help="End when standard input is closed.")
@click.option("--owned-folder", type=Path, hidden=True, help="Folder for sockets, of the process at the end of stdin.")
def worker(
    *,
    tags: str,
    trust: tuple[str, ...],
    log_level: str,
    exit_with_stdin: bool,
    owned_folder: Path | None,
    **options: object,
) -> None:
    """Serve as a worker: hold the stages that a coordinator gives out, for run after run.

    Other users of this machine can see arguments: where that matters, give the join string in the variable
    TORCHSLICER_JOIN, in a file, or on stdin.
    """
    from torchslicer.config import RunConfig  # noqa: PLC0415 - `--help` needs none of it
    from torchslicer.serving import run_worker  # noqa: PLC0415 - imports torch

    logger = logging.getLogger("torchslicer")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(log_level.upper())
    sys.path.insert(0, str(Path.cwd()))  # trusted packages may lie beside the user, as for `torchslicer plan`
    if options["join"] == "-":
        options["join"] = sys.stdin.buffer.readline(_MAX_JOIN_BYTES).decode("ascii", "replace").strip()
    tls = {key: options.pop(f"tls_{key}") for key in ("ca", "cert", "key", "names")}
    owner = _Owner()
    if exit_with_stdin:
        owner.start()
    names = [tag.strip() for tag in tags.split(",") if tag.strip()] or None
    config = options.pop("config")
    options["run_config"] = None if config is None else RunConfig.load(str(config))
    options["once"] = options["once"] or None  # not given: as the configuration says
    options |= {"tls": tls if any(tls.values()) else None, "socket_folder": owned_folder}
    try:
        run_worker(tags=names, trust=trust, stop=owner.gone, exit_after_s=10.0, **options)  # type: ignore[arg-type]
    finally:
        if owned_folder is not None and owner.was_killed():
            shutil.rmtree(owned_folder, ignore_errors=True)


class _Owner(threading.Thread):
    """Follows standard input, which ends with the process that started this one.

    That process says "stop" before it closes its end; if it does not, it was killed.
    """

    def __init__(self) -> None:
        super().__init__(name="torchslicer-stdin", daemon=True)
        self.gone = threading.Event()
        self._said_a_word = False

    def run(self) -> None:
        # Not sys.stdin: a thread that waits in it would make the interpreter abort at its end.
        while word := os.read(sys.stdin.fileno(), 4096):
            if b"stop" in word:
                self._said_a_word = True
                break  # forked processes may have copies of the other end, so it may stay open
        self.gone.set()

    def was_killed(self) -> bool:
        """Whether it is gone without a word; the connection to it may have ended a moment before standard input."""
        return self.gone.wait(_OWNER_TIMEOUT_S) and not self._said_a_word

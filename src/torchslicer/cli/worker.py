"""``torchslicer worker``: offer this machine to a coordinator, or wait for a P2P driver."""

from __future__ import annotations

import logging
import sys
import threading

import click


@click.command()
@click.option("--coordinator", metavar="HOST:PORT", help="Where the coordinator is; it may start later.")
@click.option("--listen", metavar="HOST:PORT", help="P2P: wait here for a driver instead.")
@click.option("--bind", metavar="HOST:PORT", help="Where to take data connections.")
@click.option("--advertise", metavar="HOST", help="Host that others are told to connect to.")
@click.option("--device", default=None, help="auto, cpu, cuda:0 ... (default: auto)")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch (default: the host's cores, shared).")
@click.option("--tags", default="", help="Comma-separated; a coordinator may ask for them.")
@click.option("--name", help="Name of the worker; stages are given out in the order of names.")
@click.option("--trust", multiple=True, metavar="PACKAGE", help="A package whose classes models may use; repeatable.")
@click.option("--once", is_flag=True, help="End when the first coordinator is gone.")
@click.option("--log-level", default="INFO", show_default=True, help="What to log to stderr.")
@click.option("--exit-with-stdin", is_flag=True, hidden=True, help="End when standard input is closed.")
def worker(tags: str, trust: tuple[str, ...], log_level: str, *, exit_with_stdin: bool, **options: object) -> None:
    """Serve as a worker: hold the stages that a coordinator gives out, for run after run."""
    from torchslicer.serving import run_worker  # noqa: PLC0415 - imports torch

    logger = logging.getLogger("torchslicer")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(log_level.upper())
    stop = threading.Event()
    if exit_with_stdin:
        threading.Thread(target=_follow_stdin, args=(stop,), daemon=True).start()
    names = [tag.strip() for tag in tags.split(",") if tag.strip()] or None
    run_worker(tags=names, trust=trust, stop=stop, **options)  # type: ignore[arg-type]


def _follow_stdin(stop: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    stop.set()

"""Train on workers that register here: start as many as the experiment has stages, before or after this.

On loopback nothing else is needed. With ``--bind 0.0.0.0:50054`` it prints the line that starts a worker on another
machine; see README.md.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from models import TASKS

import torchslicer as ts
from torchslicer.discovery import CoordinatorDiscovery
from torchslicer.executors.distributed import DistributedExecutor

EXPERIMENT = Path(__file__).parent / "experiments" / "gpt_4workers_1f1b.yaml"


def main() -> None:
    """Wait for the workers, train, and say how the loss went; the trained weights are in the model here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", default=EXPERIMENT, help="a YAML file (default: %(default)s)")
    parser.add_argument("--model", choices=TASKS, default="gpt")
    parser.add_argument("--bind", metavar="HOST:PORT", help="where to listen, in place of the file's")
    parser.add_argument("--workers", type=int, help="number of stages and workers, in place of the file's")
    parser.add_argument("--epochs", type=int, help="in place of the file's")
    parser.add_argument("--steps", type=int, default=8, help="steps an epoch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--run-id", help="name of the run")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")  # noqa: TID251 - a program, not a library
    logging.getLogger("torchslicer").setLevel(logging.INFO)

    config = ts.RunConfig.load(arguments.experiment)
    if arguments.workers:
        config.discovery.n_workers = arguments.workers
    if arguments.epochs:
        config.training.epochs = arguments.epochs
    task = TASKS[arguments.model]
    torch.manual_seed(0)
    model = task.build()

    discovery = CoordinatorDiscovery(run_id=arguments.run_id)
    with DistributedExecutor(discovery, arguments.bind, run_config=config) as executor:
        print(f"waiting for {config.discovery.n_workers} workers at {executor.address}", flush=True)
        sliced = ts.slice(model, executor=executor, run_config=config)
        history = sliced.train(task.load(arguments.steps, arguments.batch_size), run_config=config)
    for epoch in history:
        print(f"epoch {epoch['epoch']}: loss {epoch['loss']!r} (guessing: {task.guessing:.2f})")


if __name__ == "__main__":
    main()

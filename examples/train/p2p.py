"""Train without a coordinator: workers listen, and this driver reaches out to them.

Stage 0 stays on this machine, in a process that the driver starts: the raw inputs never leave it. The labels go to the
last peer of the list, and what crosses the cuts goes from stage to stage.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from models import TASKS

import torchslicer as ts
from torchslicer.discovery import StaticDiscovery
from torchslicer.executors.distributed import DistributedExecutor

EXPERIMENT = Path(__file__).parent / "experiments" / "p2p.yaml"


def main() -> None:
    """Reach the peers, train, and say how the loss went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="?", default=EXPERIMENT, help="a YAML file (default: %(default)s)")
    parser.add_argument("--model", choices=TASKS, default="gpt")
    parser.add_argument("--peers", help="HOST:PORT,... in the order of stages, in place of the file's")
    parser.add_argument("--epochs", type=int, help="in place of the file's")
    parser.add_argument("--steps", type=int, default=8, help="steps an epoch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, help="of stage 0 (default: the cores, shared with peers on this host)")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")  # noqa: TID251 - a program, not a library
    logging.getLogger("torchslicer").setLevel(logging.INFO)

    config = ts.RunConfig.load(arguments.experiment)
    if arguments.epochs:
        config.training.epochs = arguments.epochs
    peers = arguments.peers.split(",") if arguments.peers else config.discovery.peers
    task = TASKS[arguments.model]
    torch.manual_seed(0)
    model = task.build()

    executor = DistributedExecutor(
        StaticDiscovery(peers=peers), run_config=config, host_stage=0, host_threads=arguments.threads
    )
    with executor:
        sliced = ts.slice(model, n=1 + len(peers), executor=executor, run_config=config)
        print(sliced.plan)
        history = sliced.train(task.load(arguments.steps, arguments.batch_size), run_config=config)
    for epoch in history:
        print(f"epoch {epoch['epoch']}: loss {epoch['loss']!r} (guessing: {task.guessing:.2f})")


if __name__ == "__main__":
    main()

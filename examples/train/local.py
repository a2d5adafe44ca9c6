"""Train in this process: the same model, data and settings as the other examples, with no worker at all."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from models import TASKS

import torchslicer as ts

EXPERIMENT = Path(__file__).parent / "experiments" / "gpt_4workers_1f1b.yaml"


def main() -> None:
    """Cut, train, and say how the loss went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", nargs="?", default=EXPERIMENT, help="a YAML file (default: %(default)s)")
    parser.add_argument("--model", choices=TASKS, default="gpt")
    parser.add_argument("--epochs", type=int, help="in place of the file's")
    parser.add_argument("--steps", type=int, default=8, help="steps an epoch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, help="of torch; the bits depend on them")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    config = ts.RunConfig.load(arguments.experiment)
    if arguments.epochs:
        config.training.epochs = arguments.epochs
    task = TASKS[arguments.model]
    torch.manual_seed(0)
    model = task.build()

    sliced = ts.slice(model, run_config=config)
    print(sliced.plan)
    history = sliced.train(task.load(arguments.steps, arguments.batch_size), run_config=config)
    for epoch in history:
        print(f"epoch {epoch['epoch']}: loss {epoch['loss']!r} (guessing: {task.guessing:.2f})")


if __name__ == "__main__":
    main()

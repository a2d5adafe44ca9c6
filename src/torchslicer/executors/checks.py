"""What a cut must fulfil to be run by several processes, beyond what one process asks of it."""

from __future__ import annotations

from torchslicer.errors import SliceError
from torchslicer.executors.base import Cut
from torchslicer.pipeline.batchnorm import training_batch_norms
from torchslicer.pipeline.stage import inputs_of_stage


def check_statistics(cut: Cut) -> None:
    """Check that no BatchNorm is called in two stages: each process would keep running statistics of its own.

    Raises:
        SliceError: One is.
    """
    graph = cut.graphs.training
    stages: dict[str, set[int]] = {}
    for unit in graph.units:
        for name in unit.buffers:
            stages.setdefault(name, set()).add(cut.stage_of[unit.index])
    for path in training_batch_norms(graph.model):
        name = f"{path}.running_mean" if path else "running_mean"
        if len(found := sorted(stages.get(name, ()))) > 1:
            where = " and ".join(map(str, found))
            raise SliceError(
                f"BatchNorm '{path}' is called in stages {where}, so each worker would keep running statistics of its "
                f"own; choose cuts= that leave all its calls in one stage, give each call a BatchNorm of its own, or "
                "train with the local executor"
            )


def check_inputs_stay(cut: Cut) -> None:
    """Check that only stage 0 uses the model's inputs, so that they need not leave the machine that holds it.

    Raises:
        SliceError: Another stage does.
    """
    modes = ((cut.graphs.training, cut.stage_of), (cut.graphs.evaluation, cut.evaluation_stage_of))
    for graph, stage_of in modes:
        for stage in range(1, cut.num_stages):
            if names := inputs_of_stage(graph, stage_of, stage):
                raise SliceError(
                    f"host_stage=0 keeps the model's inputs on this machine, but stage {stage} uses the input "
                    f"'{next(iter(names))}' itself; let the model turn it into a value of stage 0 first, choose cuts= "
                    "so that stage 0 holds all its uses, or leave host_stage out"
                )

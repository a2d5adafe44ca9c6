"""What a cut must fulfil to be run by several processes, or with micro-batches, beyond what the graph asks of it."""

from __future__ import annotations

from collections.abc import Sequence

from torchslicer.cluster.members import Member
from torchslicer.cluster.part import ShippedPart
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.errors import ConfigError, ShippingError, SliceError
from torchslicer.executors.base import Cut
from torchslicer.pipeline.batchnorm import training_batch_norms
from torchslicer.pipeline.stage import inputs_of_stage


def check_enough(stages: int, *, at_most: int | None, peers: Sequence[str] | None, hosted: int) -> None:
    """Check, before any process starts and before anything is waited for, that every stage can get a worker.

    Args:
        stages: How many there are.
        at_most: How many workers there can be, where that is known.
        peers: The list of those to be dialled, if there is one.
        hosted: Stages that a process of this machine holds, beside the list.

    Raises:
        ConfigError: There can never be enough.
    """
    if at_most is not None and stages > at_most:
        raise ConfigError(
            f"{stages} stages need {stages} workers, and only {at_most} were started; start more, as in "
            f"simulated({stages}), or cut into fewer stages"
        )
    if peers is not None and len(peers) < stages - hosted:
        beside = " beside the one of this machine" if hosted else ""
        raise ConfigError(
            f"{stages} stages need {stages - hosted} peers{beside}, the list has {len(peers)}: {list(peers)}"
        )


def check_statistics(cut: Cut) -> None:
    """Check that no buffer that training changes is used in two stages: each process would keep one of its own.

    Raises:
        SliceError: One is; for BatchNorm the message says so.
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
    check_changing_buffers(cut, "each worker would keep a buffer of its own")


def check_changing_buffers(cut: Cut, consequence: str) -> None:
    """Check that no buffer that a forward pass changes is used in two stages.

    Raises:
        SliceError: One is.
    """
    for name, units in cut.graphs.training.changing.items():
        stages = sorted({cut.stage_of[unit] for unit in units})
        if len(stages) > 1:
            raise SliceError(
                f"buffer '{name}' changes in the forward pass and is used in stages {' and '.join(map(str, stages))}: "
                f"{consequence}; choose cuts= that leave all its uses in one stage, give each use a buffer of its own, "
                "or train with the local executor and without micro-batches"
            )


def check_members(members: Sequence[Member], parts: Sequence[ShippedPart]) -> None:
    """Check that ``members[i]`` may hold stage ``i``.

    Raises:
        ConfigError: Two of them are in one process.
        ShippingError: One does not allow the builder that its part of the model is made by.
    """
    _check_processes(members)
    _check_builders(members, parts)


def _check_processes(members: Sequence[Member]) -> None:
    """Stages in one process would wait for each other: who runs a batch needs the process's random numbers alone."""
    found: dict[str, tuple[int, Member]] = {}
    for stage, member in enumerate(members):
        process = member.hello.process
        if process in found:
            other, first = found[process]
            raise ConfigError(
                f"stages {other} and {stage} would be in one process, that of {first} and {member}: a process computes "
                "one stage of a run at a time, as torch's random numbers belong to all of it; start each worker in a "
                "process of its own (torchslicer worker), or use ts.simulate, which starts them"
            )
        if process:
            found[process] = stage, member


def _check_builders(members: Sequence[Member], parts: Sequence[ShippedPart]) -> None:
    for member, part in zip(members, parts, strict=True):
        allowed = Allowed(allow_builders=member.hello.builders)
        missing = [name for name in part.builders if not allowed.allows_builder(name)]
        if missing:
            raise ShippingError(
                f"{member} does not allow {missing}, which would make its part of the model; start it with "
                + " ".join(f"--allow-builder {name}" for name in missing)
                + ", from a place where it can import that; or pass the model itself to slice"
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

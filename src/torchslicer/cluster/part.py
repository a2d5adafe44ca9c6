"""What a rank is given of a cut model: its stage, how it trains, and where everything is; as plain data and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchslicer.cluster.session import Part
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.builder import Builder
from torchslicer.cluster.shipping.built_stage import BuiltStages, decode_built_stage, is_built_stage
from torchslicer.cluster.shipping.options import (
    Shipped,
    decode_criterion,
    decode_optimizer,
    decode_scheduler,
    encode_criterion,
    encode_optimizer,
    encode_scheduler,
)
from torchslicer.cluster.shipping.stage_codec import ShippedStage, StageGraph, encode_stage
from torchslicer.cluster.shipping.stage_restore import decode_stage
from torchslicer.errors import ProtocolError
from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.criterion import build_criterion
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.pipeline.stage import Route

_PLAIN = (
    "schedule", "num_microbatches", "accumulate", "max_grad_norm", "recompute", "batch_norm", "mixed_precision", "seed"
)  # fmt: skip
_KEYS = {"stage", "optimizer", "scheduler", "criterion", "options", "rank_of"}


@dataclass(frozen=True)
class ModeCut:
    """A graph, the stage of each of its units, and the values that cross cuts."""

    graph: ModelGraph
    stage_of: tuple[int, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class ShippedPart:
    """What is sent to a rank, the modules that it must trust for it, and the builders that it must allow."""

    description: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    required: tuple[str, ...]
    builders: tuple[str, ...] = ()


def built_stages(builder: Builder | None, training: ModeCut, evaluation: ModeCut) -> BuiltStages | None:
    """Return what writes the stages of a model that workers are to build, None if its parts travel as data.

    What `torch.export` has seen is plain data already, a list of torch's own operations, and is not traced anew.

    Raises:
        ShippingError: Workers could not find the pack function.
    """
    if builder is None or "export" in (training.graph.source, evaluation.graph.source):
        return None
    modes = [StageGraph(cut.graph, cut.stage_of, cut.routes) for cut in (training, evaluation)]
    return BuiltStages(builder, (modes[0], modes[1]))


def encode_part(
    training: ModeCut,
    evaluation: ModeCut,
    stage: int,
    rank_of: Sequence[int],
    options: TrainingOptions,
    *,
    built: BuiltStages | None = None,
) -> ShippedPart:
    """Write the part of the rank that holds *stage*. Only the last stage gets the criterion.

    Args:
        training: The cut in training mode.
        evaluation: The cut in evaluation mode.
        stage: Number of the stage.
        rank_of: Rank of each stage.
        options: How to train.
        built: From `built_stages`, if the worker is to build the model itself.

    Raises:
        ShippingError: Something cannot be carried to another process; the message names it and what to do.
    """
    shipped = built.encode(stage) if built is not None else _as_data(training, evaluation, stage)
    pieces: dict[str, Shipped] = {
        "stage": (shipped.description, shipped.tensors, shipped.required),
        "optimizer": encode_optimizer(options.optimizer),
        "scheduler": encode_scheduler(options.scheduler),
    }
    if stage == training.stage_of[-1]:
        pieces["criterion"] = encode_criterion(options.criterion)
    description: dict[str, Any] = {name: piece[0] for name, piece in pieces.items()}
    description.setdefault("criterion", None)
    description["options"] = {name: getattr(options, name) for name in _PLAIN}
    description["rank_of"] = list(rank_of)
    tensors = {f"{name}/{key}": tensor for name, piece in pieces.items() for key, tensor in piece[1].items()}
    required = tuple(dict.fromkeys(module for piece in pieces.values() for module in piece[2]))
    return ShippedPart(description, tensors, required, () if built is None else built.allowed)


def _as_data(training: ModeCut, evaluation: ModeCut, stage: int) -> ShippedStage:
    return encode_stage(
        training.graph,
        stage,
        training.stage_of,
        training.routes,
        evaluation=(evaluation.graph, evaluation.stage_of, evaluation.routes),
    )


def decode_part(
    description: Any, tensors: Mapping[str, torch.Tensor], *, device: torch.device, allowed: Allowed
) -> Part:
    """Make what `encode_part` wrote, on *device*.

    Raises:
        ShippingError: The description is broken, or names what this worker does not accept.
        ProtocolError: The description is no part of a run.
    """
    if not isinstance(description, dict) or set(description) != _KEYS:
        raise ProtocolError("the description of a part is malformed")
    own = {name: _own(tensors, name) for name in _KEYS}
    decode = decode_built_stage if is_built_stage(description["stage"]) else decode_stage
    stage = decode(description["stage"], own["stage"], allowed)
    optimizer = decode_optimizer(description["optimizer"], own["optimizer"], allowed)
    scheduler = decode_scheduler(description["scheduler"], own["scheduler"], allowed, optimizer=optimizer)
    criterion = build_criterion("mse")
    if description["criterion"] is not None:
        criterion = decode_criterion(description["criterion"], own["criterion"], allowed)
    options = _options(description["options"], TrainingOptions(optimizer, criterion, scheduler))
    rank_of = tuple(int(rank) for rank in description["rank_of"])
    _move(stage.training.graph, device)
    return Part(
        graph=stage.training.graph,
        stage_of=stage.training.stage_of,
        routes=stage.training.routes,
        evaluation_graph=stage.evaluation.graph,
        evaluation_stage_of=stage.evaluation.stage_of,
        evaluation_routes=stage.evaluation.routes,
        held=(stage.stage,),
        rank_of=rank_of,
        device=device,
        options=options,
    )


def _own(tensors: Mapping[str, torch.Tensor], piece: str) -> dict[str, torch.Tensor]:
    prefix = piece + "/"
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _options(found: Any, base: TrainingOptions) -> TrainingOptions:
    if not isinstance(found, dict) or set(found) != set(_PLAIN):
        raise ProtocolError("the options of a run are malformed")
    return replace(base, **found)


def _move(graph: ModelGraph, device: torch.device) -> None:
    for tensor in (*graph.parameters.values(), *graph.buffers.values()):
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
    for name, constant in graph.constants.items():
        graph.constants[name] = constant.to(device)

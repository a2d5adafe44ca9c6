"""What a rank is given of a cut model: its stage, how it trains, and where everything is; as plain data and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchslicer.cluster.session import Part
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.options import (
    Shipped,
    decode_criterion,
    decode_optimizer,
    decode_scheduler,
    encode_criterion,
    encode_optimizer,
    encode_scheduler,
)
from torchslicer.cluster.shipping.stage_codec import encode_stage
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
    """What is sent to a rank, and the packages that it must trust for it."""

    description: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    required: tuple[str, ...]


def encode_part(
    training: ModeCut, evaluation: ModeCut, stage: int, rank_of: Sequence[int], options: TrainingOptions
) -> ShippedPart:
    """Write the part of the rank that holds *stage*. Only the last stage gets the criterion.

    Raises:
        ShippingError: Something cannot be carried to another process; the message names it and what to do.
    """
    shipped = encode_stage(
        training.graph,
        stage,
        training.stage_of,
        training.routes,
        evaluation=(evaluation.graph, evaluation.stage_of, evaluation.routes),
    )
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
    return ShippedPart(description, tensors, required)


def decode_part(
    description: Any, tensors: Mapping[str, torch.Tensor], *, device: torch.device, trusted: Sequence[str]
) -> Part:
    """Make what `encode_part` wrote, on *device*.

    Raises:
        ShippingError: The description is broken, or names what this worker does not accept.
        ProtocolError: The description is no part of a run.
    """
    if not isinstance(description, dict) or set(description) != _KEYS:
        raise ProtocolError("the description of a part is malformed")
    allowed = Allowed(trusted)
    own = {name: _own(tensors, name) for name in _KEYS}
    stage = decode_stage(description["stage"], own["stage"], allowed)
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

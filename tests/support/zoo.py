"""Every torchvision model that takes images or clips, and one training step of each, whole and sliced.

A sliced step is compared with the plain backward pass of the unsplit model: the loss, every gradient and every buffer.
A model with random layers (dropout, stochastic depth) draws its random numbers elsewhere once it is sliced, so it is
compared twice: as it is, with itself in one stage; and with its random layers switched off, with the plain model.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torchslicer as ts

GROUPS = ("classification", "segmentation", "video")
STAGES = (2, 4)
BATCH = 2
TOLERANCE = 1e-5
ON_DISK_FROM = 250_000_000
"""Models with more parameters keep their reference gradients in a file, so that 8 GiB of memory are enough."""

_SLOW_INITIALISERS = ("kaiming_normal_", "kaiming_uniform_", "normal_", "trunc_normal_", "uniform_", "xavier_normal_",
                      "xavier_uniform_")  # fmt: skip
_CLIPS = {"s3d": (13, 209), "mvit_v1_b": (8, 64), "mvit_v2_s": (8, 64)}
_IMAGES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 28, "vit_b_32": 64, "vit_l_32": 64}
_FAMILIES = (
    "swin_v2", "swin3d", "mobilenet_v2", "mobilenet_v3", "efficientnet_v2", "shufflenet_v2", "wide_resnet", "mc3",
    "r2plus1d", "r3d", "resnext", "deeplabv3", "inception_v3", "regnet_x", "regnet_y",
)  # fmt: skip


@dataclass(frozen=True)
class ZooModel:
    """A model of torchvision and the smallest convenient input for it."""

    name: str
    group: str

    @property
    def family(self) -> str:
        """What the model's kin are called: ``resnet18`` is a ``resnet``."""
        for family in _FAMILIES:
            if self.name.startswith(family):
                return family
        return self.name.split("_")[0].rstrip("0123456789")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the input, the batch first."""
        if self.group == "video":
            frames, size = _CLIPS.get(self.name, (4, 64))
            return (BATCH, 3, frames, size, size)
        size = _IMAGES.get(self.name, 32 if self.family == "vit" else 64)
        return (BATCH, 3, size, size)

    def options(self) -> dict[str, Any]:
        """Return what the builder is given: no download, auxiliary outputs on, sizes as small as the input."""
        options: dict[str, Any] = {"weights": None}
        if self.group == "segmentation":
            options["weights_backbone"] = None
            if self.family != "lraspp":
                options["aux_loss"] = True
        if self.name in ("googlenet", "inception_v3"):
            options |= {"init_weights": False, "aux_logits": True}
        if self.family == "vit":
            options["image_size"] = self.shape[-1]
        return options

    def build(self) -> nn.Module:
        """Return the model in training mode, its weights drawn quickly and repeatably."""
        from torchvision import models

        torch.manual_seed(0)
        with _cheap_initialisation(), _small_clips(self.shape):
            model: nn.Module = models.get_model(self.name, **self.options()).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():  # a head of zeros would leave nothing to compare: no gradient gets past it
                    parameter.uniform_(-0.02, 0.02)
        return model

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return an input and a target for it."""
        torch.manual_seed(1)
        inputs = torch.randn(self.shape)
        dense = (BATCH, *self.shape[2:]) if self.group == "segmentation" else (BATCH,)
        return inputs, torch.randint(0, 21, dense)


def zoo() -> list[ZooModel]:
    """Return all classification, segmentation and video models that the installed torchvision lists."""
    from torchvision import models

    modules = {"classification": models, "segmentation": models.segmentation, "video": models.video}
    return [ZooModel(name, group) for group in GROUPS for name in models.list_models(modules[group])]


def find(name: str) -> ZooModel:
    """Return the model called *name*."""
    return next(entry for entry in zoo() if entry.name == name)


@contextlib.contextmanager
def _cheap_initialisation() -> Iterator[None]:
    """Draw all weights from uniform distributions: a truncated normal takes ten times as long."""
    originals = {name: getattr(nn.init, name) for name in _SLOW_INITIALISERS}

    def draw(tensor: Tensor, *_: object, **__: object) -> Tensor:
        fan_in = tensor[0].numel() if tensor.dim() > 1 else 2500
        bound = math.sqrt(3.0 / max(fan_in, 1))
        with torch.no_grad():
            return Tensor.uniform_(tensor, -bound, bound)

    try:
        for name in originals:
            setattr(nn.init, name, draw)
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


@contextlib.contextmanager
def _small_clips(shape: tuple[int, ...]) -> Iterator[None]:
    """Let the MViT builders, which fix the size of the clip, make the same layers for a smaller one."""
    from torchvision.models.video import mvit

    original = mvit._mvit

    def smaller(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "temporal_size": shape[2], "spatial_size": shape[3:]})

    mvit._mvit = smaller
    try:
        yield
    finally:
        mvit._mvit = original


# -- one step ------------------------------------------------------------------------------------------------------


def criterion(output: Any, target: Tensor) -> Tensor:
    """Sum of the cross-entropies of all outputs, auxiliary ones with less weight."""
    outputs = [leaf for leaf in pytree.tree_leaves(_plain(output)) if leaf is not None]
    losses = [F.cross_entropy(leaf, target) for leaf in outputs]
    return losses[0] + sum((0.4 * loss for loss in losses[1:]), start=torch.zeros(()))


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


@dataclass(frozen=True)
class Step:
    """What one training step computes: loss, every gradient by name, every buffer afterwards."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]

    @classmethod
    def plain(cls, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
        """Run the unsplit model the usual way."""
        with _same_buffers(model):
            loss = criterion(model(batch[0]), batch[1])
            loss.backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            model.zero_grad(set_to_none=True)
            return cls(float(loss.detach()), gradients, _buffers(model))

    @classmethod
    def sliced(cls, model: nn.Module, batch: tuple[Tensor, Tensor], sliced: ts.SlicedModel) -> Step:
        """Run the stages."""
        with _same_buffers(model):
            loss, gradients = sliced.gradients(batch, criterion)
            return cls(loss, gradients, _buffers(model))

    def on_disk(self, folder: Path) -> Step:
        """Return the same with its gradients in a file, read when they are looked at."""
        file = folder / "gradients.pt"
        torch.save(dict(self.gradients), file)
        return Step(self.loss, torch.load(file, mmap=True, weights_only=True), self.buffers)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@contextlib.contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Give the buffers back as they were, so that every step starts from the same model."""
    before = _buffers(model)
    try:
        yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def draws(model: nn.Module, batch: tuple[Tensor, Tensor]) -> bool:
    """Whether the forward pass draws random numbers."""
    torch.manual_seed(2)
    before = torch.get_rng_state()
    with torch.no_grad(), _same_buffers(model):
        model(batch[0])
    return not torch.equal(before, torch.get_rng_state())


@contextlib.contextmanager
def without_random_layers(model: nn.Module) -> Iterator[None]:
    """Switch dropout and stochastic depth off; all else stays in training mode."""
    from torchvision.ops import StochasticDepth

    layers = [m for m in model.modules() if isinstance(m, (nn.modules.dropout._DropoutNd, StochasticDepth))]
    probabilities = [layer.p for layer in layers]
    try:
        for layer in layers:
            layer.p = 0.0
        yield
    finally:
        for layer, probability in zip(layers, probabilities, strict=True):
            layer.p = probability


# -- comparison ----------------------------------------------------------------------------------------------------


def compare(expected: Step, found: Step) -> tuple[float, str]:
    """Return the largest relative difference, and where it is ("" for none)."""
    if list(expected.gradients) != list(found.gradients):
        return math.inf, "the names of the parameters"
    worst = (0.0, "")
    if expected.loss != found.loss:
        worst = (abs(expected.loss - found.loss) / max(abs(expected.loss), abs(found.loss)), "the loss")
    for kind, one, other in (
        ("gradient", expected.gradients, found.gradients),
        ("buffer", expected.buffers, found.buffers),
    ):
        for name, tensor in one.items():
            difference = _difference(tensor, other[name])
            if difference > worst[0]:
                worst = (difference, f"the {kind} of '{name}'" if kind == "gradient" else f"buffer '{name}'")
    return worst


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    scale = max(a.abs().max().item(), b.abs().max().item())
    difference = (a.double() - b.double()).abs().max().item() / scale
    return difference if math.isfinite(difference) else math.inf


def sane(step: Step) -> str:
    """Return what makes *step* no good reference ("" for nothing)."""
    if not math.isfinite(step.loss):
        return f"the loss of the unsplit model is {step.loss}"
    gradients = [gradient for gradient in step.gradients.values() if gradient is not None]
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        return "a gradient of the unsplit model is not finite"
    if sum(bool(gradient.any()) for gradient in gradients) < 0.8 * len(gradients):
        return "most gradients of the unsplit model are 0"
    return ""


@dataclass
class Outcome:
    """What became of one model.

    ``results`` says for each number of stages "exact", "close" or what went wrong; ``differences`` the largest
    relative difference; ``seconds`` is processor time, ``memory`` the peak in GiB.
    """

    name: str
    group: str
    family: str
    parameters: int = 0
    units: int = 0
    kept_whole: list[str] = field(default_factory=list)
    random: bool = False
    results: dict[str, str] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    memory: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every number of stages gave what the unsplit model gives."""
        return all(self.results.get(str(n)) in ("exact", "close") for n in STAGES)


def examine(entry: ZooModel) -> Outcome:
    """Slice a model in all ways and compare a training step of each with the unsplit model's."""
    started = time.process_time()
    outcome = Outcome(entry.name, entry.group, entry.family)
    model, batch = entry.build(), entry.batch()
    outcome.parameters = sum(parameter.numel() for parameter in model.parameters())
    outcome.random = draws(model, batch)
    with tempfile.TemporaryDirectory() as folder:
        _Examination(model, batch, outcome, Path(folder)).run()
    outcome.seconds = time.process_time() - started
    return outcome


class _Examination:
    """The steps of `examine`, on one model."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor], outcome: Outcome, folder: Path) -> None:
        self.model = model
        self.batch = batch
        self.outcome = outcome
        self.folder = folder
        self.made: dict[int, ts.SlicedModel] = {}

    def run(self) -> None:
        if self.outcome.random:
            self.compare_with(self.sliced_step(1), tolerance=0.0)
            self.made.clear()  # a cut holds the probabilities of stochastic depth as they were when it was made
        with without_random_layers(self.model):
            if draws(self.model, self.batch):
                self.conclude("random numbers are drawn outside of random layers", *map(str, STAGES))
                return
            self.compare_with(Step.plain(self.model, self.batch), tolerance=TOLERANCE)

    def sliced_step(self, stages: int) -> Step:
        """Run a step in *stages* stages, which are made at the first call."""
        if stages not in self.made:
            # Where the cuts are does not matter to the library's own verification: once is enough.
            verify = stages == STAGES[0] and not self.outcome.differences
            self.made[stages] = ts.slice(self.model, n=stages, verify=verify)
        sliced = self.made[stages]
        step = Step.sliced(self.model, self.batch, sliced)
        if len(sliced.plan.stages) != stages:
            raise RuntimeError(f"{len(sliced.plan.stages)} stages instead of {stages}")
        self.outcome.units = len(sliced.graph.units)
        self.outcome.kept_whole = list(sliced.graph.attempts)
        return step

    def compare_with(self, reference: Step, *, tolerance: float) -> None:
        """Compare each number of stages with *reference*."""
        problem = sane(reference)
        if self.outcome.parameters > ON_DISK_FROM:
            reference = reference.on_disk(self.folder)
        for stages in STAGES:
            key = str(stages)
            try:
                difference, where = (math.inf, problem) if problem else compare(reference, self.sliced_step(stages))
            except ts.TorchSlicerError as error:
                self.conclude(f"{type(error).__name__}: {error}", key)
                continue
            self.outcome.differences[key] = max(difference, self.outcome.differences.get(key, 0.0))
            self.conclude(_verdict(difference, where, tolerance), key)

    def conclude(self, verdict: str, *keys: str) -> None:
        """Note *verdict*, unless a worse one stands already."""
        for key in keys:
            before = self.outcome.results.get(key, "exact")
            if before == "exact" or (before == "close" and verdict != "exact"):
                self.outcome.results[key] = verdict


def _verdict(difference: float, where: str, tolerance: float) -> str:
    if difference == 0.0:
        return "exact"
    return "close" if difference <= tolerance else f"{where} differs: {difference:.2g}"

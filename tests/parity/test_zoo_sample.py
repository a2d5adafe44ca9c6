"""Models of torchvision, sliced without a pack function: the loss, every gradient and every buffer, bit for bit.

`make zoo` does this for all of them; here is one of each kind.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts import zoo as script
from tests.support.zoo import GROUPS, Outcome, Step, ZooModel, compare, draws, examine, find, sane, zoo

QUICK = ("mobilenet_v3_small", "regnet_y_400mf", "shufflenet_v2_x0_5", "squeezenet1_1", "lraspp_mobilenet_v3_large")
THOROUGH = (
    "resnet18", "vgg11_bn", "densenet121", "inception_v3", "googlenet", "efficientnet_b0", "mnasnet0_5",
    "convnext_tiny", "swin_t", "swin_v2_t", "maxvit_t", "vit_b_16", "fcn_resnet50", "deeplabv3_mobilenet_v3_large",
    "r3d_18", "s3d", "mvit_v1_b", "swin3d_t",
)  # fmt: skip


def check(name: str) -> None:
    outcome = examine(find(name))
    assert outcome.results == {"2": "exact", "4": "exact"}, outcome
    assert outcome.kept_whole == []


@pytest.mark.parametrize("name", QUICK)
def test_a_model_of_each_kind(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", THOROUGH)
def test_more_models(name: str) -> None:
    check(name)


def test_the_zoo_is_whole() -> None:
    entries = zoo()
    sizes = {group: sum(entry.group == group for entry in entries) for group in GROUPS}
    assert sizes["classification"] >= 80, "torchvision 0.20 lists 80"
    assert sizes["segmentation"] >= 6
    assert sizes["video"] >= 9
    assert {find("resnext50_32x4d").family, find("resnet18").family} == {"resnext", "resnet"}


# -- the comparison sees what it is there for ----------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, one of them with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 21, 3)
        self.norm = nn.BatchNorm2d(21)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))


def step_of(net: nn.Module) -> Step:
    torch.manual_seed(1)
    return Step.plain(net, (torch.randn(2, 3, 8, 8), torch.tensor([3, 7])))


def test_a_step_leaves_the_model_as_it_was_and_repeats() -> None:
    net = Net()
    first = step_of(net)
    assert net.norm.num_batches_tracked.item() == 0
    assert first.buffers["norm.num_batches_tracked"].item() == 1
    assert all(parameter.grad is None for parameter in net.parameters())
    assert compare(first, step_of(net)) == (0.0, "")
    assert sane(first) == ""


def test_a_changed_gradient_is_seen() -> None:
    step = step_of(Net())
    gradients = dict(step.gradients)
    weight = gradients["conv.weight"]
    assert weight is not None
    changed = weight.clone()
    changed[0, 0, 0, 0] += weight.abs().max() / 1000
    difference, where = compare(step, dataclasses.replace(step, gradients={**gradients, "conv.weight": changed}))
    assert difference == pytest.approx(1e-3, rel=0.01)
    assert where == "the gradient of 'conv.weight'"


def test_a_missing_gradient_and_a_changed_buffer_and_loss_are_seen() -> None:
    step = step_of(Net())
    missing = dataclasses.replace(step, gradients={**step.gradients, "conv.bias": None})
    assert compare(step, missing) == (math.inf, "the gradient of 'conv.bias'")
    buffers = {**step.buffers, "norm.running_mean": step.buffers["norm.running_mean"] * 2}
    assert compare(step, dataclasses.replace(step, buffers=buffers)) == (0.5, "buffer 'norm.running_mean'")
    assert compare(step, dataclasses.replace(step, loss=step.loss * 2)) == (0.5, "the loss")


def test_a_reference_without_gradients_is_refused() -> None:
    step = step_of(Net())
    zeros = {name: None if g is None else torch.zeros_like(g) for name, g in step.gradients.items()}
    assert sane(dataclasses.replace(step, gradients=zeros)) == "most gradients of the unsplit model are 0"
    assert "loss" in sane(dataclasses.replace(step, loss=math.nan))


@pytest.mark.parametrize(("layer", "random"), [(nn.Dropout(0.5), True), (nn.Dropout(0.0), False)])
def test_random_models_are_told_by_their_draws(layer: nn.Module, random: bool) -> None:
    batch = (torch.randn(2, 3, 8, 8), torch.tensor([3, 7]))
    assert draws(nn.Sequential(Net(), layer), batch) is random


# -- the script ----------------------------------------------------------------------------------------------------

ENTRIES = [ZooModel("resnet18", "classification"), ZooModel("s3d", "video")]


def test_cache_keeps_passes_of_the_same_sources(tmp_path: Path) -> None:
    passed = Outcome("resnet18", "classification", "resnet", results={"2": "exact", "4": "close"})
    failed = Outcome("s3d", "video", "s3d", results={"2": "exact", "4": "TraceError: no"})
    cache = script.Cache(tmp_path, "now")
    cache.store(passed)
    cache.store(failed)
    assert cache.load("resnet18") == passed
    assert (cache.done("resnet18"), cache.done("s3d"), cache.done("vgg11")) == (True, False, False)
    later = script.Cache(tmp_path, "later")
    assert (later.load("resnet18"), later.done("resnet18")) == (None, False)
    assert script.Cache(tmp_path, "later", keep=True).done("resnet18")
    assert not script.Cache(tmp_path, "now", fresh=True).done("resnet18")


def test_table_counts_and_names_failures(tmp_path: Path) -> None:
    cache = script.Cache(tmp_path, "now")
    cache.store(
        Outcome(
            "resnet18", "classification", "resnet", 11_700_000, 60, results={"2": "exact", "4": "exact"},
            differences={"2": 0.0, "4": 0.0}, seconds=1.5, memory=0.5,
        )
    )  # fmt: skip
    cache.store(Outcome("s3d", "video", "s3d", random=True, results={"2": "exact", "4": "TraceError: no"}))
    text = script.table(ENTRIES, cache)
    assert "| all | 2 | 2 | 1 | 1 | 2 |" in text
    assert "| resnet18 | resnet | 11.7 | 60 | exact | exact | 0 | 1.5 | 0.5 |" in text
    assert "| s3d † | s3d | 0.0 | 0 | exact | **fails** | nan | 0.0 | 0.0 |" in text
    assert "- `s3d`, n = 4: TraceError: no" in text
    assert "earlier state" not in text
    assert "2 results come from an earlier state" in script.table(ENTRIES, script.Cache(tmp_path, "later", keep=True))


def test_unknown_models_are_refused() -> None:
    with pytest.raises(SystemExit, match="no model resnet19"):
        script.chosen(ENTRIES, script.arguments(["--only", "resnet19"]))
    assert script.chosen(ENTRIES, script.arguments(["--group", "video"])) == ENTRIES[1:]

"""Optimizers, schedulers and losses through plain data and back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.support import models
from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.options import (
    decode_criterion,
    decode_optimizer,
    decode_scheduler,
    encode_criterion,
    encode_optimizer,
    encode_scheduler,
)
from torchslicer.cluster.shipping.values import dump, load
from torchslicer.errors import ConfigError, ShippingError
from torchslicer.pipeline.criterion import build_criterion
from torchslicer.pipeline.optimizers import build_optimizer_spec, build_scheduler_spec

ALLOWED = Allowed()


def wired(shipped: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    description, tensors, required = shipped
    assert required == ()
    return load(dump(description)), {name: tensor.clone() for name, tensor in tensors.items()}


def trained(spec: Any, scheduler: Any = None) -> list[Any]:
    """Three steps of an optimizer on two parameters."""
    torch.manual_seed(0)
    named = [("a.weight", nn.Parameter(torch.randn(3, 2))), ("a.bias", nn.Parameter(torch.randn(3)))]
    optimizer = spec.build(named)
    made = None if scheduler is None else scheduler.build(optimizer)
    for _ in range(3):
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if made is not None:
            scheduler.step(made, {"loss": 1.0})
    return [parameter.detach() for _, parameter in named]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "spec",
    [
        "adamw",
        {"name": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        {"name": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
        {
            "name": "SGD",
            "params": {"lr": 0.1, "groups": [{"match": "*.bias", "lr": 0.5}, {"match": ["re:.*w.*"], "lr": 0.2}]},
        },
        torch.optim.RMSprop,
        functools.partial(torch.optim.SGD, lr=0.3),
        {"name": torch.optim.SGD, "params": {"lr": 0.3}},
    ],
)
def test_optimizers(spec: Any) -> None:
    built = build_optimizer_spec(spec)
    for given in (spec, built):
        back = decode_optimizer(*wired(encode_optimizer(given)), ALLOWED)
        assert (back.name, back.groups) == (built.name, built.groups)
        assert same(trained(back), trained(built))


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "StepLR", "params": {"step_size": 2}, "interval": "step"},
        {"name": "ReduceLROnPlateau", "params": {"patience": 0}, "monitor": "loss"},
        {
            "name": "SequentialLR",
            "params": {
                "milestones": [1],
                "schedulers": ["ConstantLR", {"name": "ExponentialLR", "params": {"gamma": 0.5}}],
            },
        },
        functools.partial(lr_scheduler.ExponentialLR, gamma=0.5),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
def test_schedulers(spec: Any) -> None:
    optimizer = build_optimizer_spec({"name": "SGD", "params": {"lr": 0.1}})
    built = build_scheduler_spec(spec, optimizer=optimizer)
    back = decode_scheduler(*wired(encode_scheduler(built)), ALLOWED, optimizer=optimizer)
    assert back is not None
    assert built is not None
    assert (back.interval, back.monitor) == (built.interval, built.monitor)
    assert same(trained(optimizer, back), trained(optimizer, built))


def test_no_scheduler() -> None:
    assert decode_scheduler(*wired(encode_scheduler(None)), ALLOWED) is None


OUTPUT, TARGET = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1, 1])


@pytest.mark.parametrize(
    "spec",
    [
        "cross_entropy",
        {"name": "CrossEntropyLoss", "params": {"weight": [1.0, 2.0, 0.5], "label_smoothing": 0.1, "reduction": "sum"}},
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        nn.MultiMarginLoss,
        F.cross_entropy,
        functools.partial(F.cross_entropy, ignore_index=2),
    ],
)
def test_criteria(spec: Any) -> None:
    built = build_criterion(spec)
    back = decode_criterion(*wired(encode_criterion(built)), ALLOWED)
    assert (back.name, back.reduction) == (built.name, built.reduction)
    assert torch.equal(back.loss(OUTPUT, TARGET), built.loss(OUTPUT, TARGET))
    assert back.count(TARGET, 4) == built.count(TARGET, 4)


def test_functions_of_the_users_packages() -> None:
    built = build_criterion({"name": models.call_and_compare, "params": {"criterion": 3}})
    description, tensors, required = encode_criterion(built)
    assert required == ("tests.support.models",)
    back = decode_criterion(description, tensors, Allowed(["tests.support"]))
    assert back.function.func is models.call_and_compare  # type: ignore[attr-defined]
    with pytest.raises(ShippingError, match="start the worker with --trust tests"):
        decode_criterion(description, tensors, ALLOWED)


@pytest.mark.parametrize(
    "spec",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        functools.partial(lambda params, lr: torch.optim.SGD(params, lr * 2), lr=1.0),
    ],
)
def test_optimizers_without_a_name(spec: Any) -> None:
    with pytest.raises(ShippingError, match=r"optimizer .*is a lambda.*Give it by name .*--trust PACKAGE"):
        encode_optimizer(spec)


def test_schedulers_and_losses_without_a_name() -> None:
    scheduler = build_scheduler_spec({"name": "LambdaLR", "params": {"lr_lambda": lambda epoch: 0.5}})
    with pytest.raises(ShippingError, match=r"scheduler LambdaLR: .*is a lambda"):
        encode_scheduler(scheduler)
    with pytest.raises(ShippingError, match=r"criterion <lambda>: .*is a lambda"):
        encode_criterion(build_criterion(lambda output, target: output.sum()))


@pytest.mark.parametrize(
    "value", [{"factory": "os:system"}, {"function": "torch:load"}, {"class": "subprocess:Popen"}, 3, None]
)
def test_hostile_options(value: Any) -> None:
    data = {"dict": [["name", value], ["params", {"dict": []}]]}
    description = {"value": data, "modules": [], "tensors": {}}
    for decode in (decode_optimizer, decode_scheduler, decode_criterion):
        with pytest.raises((ShippingError, ConfigError)):
            decode(description, {}, ALLOWED)


def test_hostile_criteria() -> None:
    description, tensors, _ = encode_criterion(build_criterion("mse"))
    for change in ({"reduction": "none"}, {"function": 3}, {"keywords": 3}, {"keywords": {1: 2}}, {"name": 3}):
        plain = {"name": "x", "reduction": "mean", "function": {"module": 0}, "keywords": {"dict": []}} | change
        keywords = {"dict": [[1, 2]]} if change.get("keywords") == {1: 2} else plain["keywords"]
        pairs = [[key, keywords if key == "keywords" else value] for key, value in plain.items()]
        with pytest.raises(ShippingError):
            decode_criterion({**description, "value": {"dict": pairs}}, tensors, ALLOWED)

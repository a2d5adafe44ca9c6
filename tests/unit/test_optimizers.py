"""Optimizers and schedulers are checked before training and made for each stage; clipping has torch's bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from torchslicer.errors import ConfigError
from torchslicer.pipeline.optimizers import (
    build_optimizer_spec,
    build_scheduler_spec,
    clip_coefficient,
    global_norm,
    gradient_norms,
    scale_gradients,
)


def parameter(*shape: int, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full(shape or (2, 2), value))


def model_parameters() -> list[tuple[str, nn.Parameter]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    return list(model.named_parameters())


ALL = sorted(
    name
    for name in dir(torch.optim)
    if isinstance(getattr(torch.optim, name), type)
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in {"Optimizer", "LBFGS"}
)


@pytest.mark.parametrize("name", ALL)
def test_every_torch_optimizer_steps_as_itself(name: str) -> None:
    ours, theirs = parameter(2, 3), parameter(2, 3)
    optimizer = build_optimizer_spec(name.lower()).build([("w", ours)])
    reference = getattr(torch.optim, name)([theirs])
    assert type(optimizer) is type(reference)
    assert dict(optimizer.defaults) == dict(reference.defaults)
    for p in (ours, theirs):
        p.grad = torch.arange(6.0).reshape(2, 3)
        p.grad = p.grad.to_sparse() if name == "SparseAdam" else p.grad
    optimizer.step()
    reference.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        {"name": torch.optim.SGD, "params": {"lr": 0.5, "momentum": 0.9}},
        functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    ],
)
def test_forms_of_specs(spec: Any) -> None:
    made = build_optimizer_spec(spec)
    optimizer = made.build([("w", parameter())])
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)
    assert build_optimizer_spec(made) is made
    assert type(build_optimizer_spec(torch.optim.Adam).build([("w", parameter())])) is torch.optim.Adam


def test_lists_become_tuples() -> None:
    spec = build_optimizer_spec({"name": "AdamW", "params": {"betas": [0.8, 0.9]}})
    assert spec.build([("w", parameter())]).defaults["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("adamv", "unknown optimizer 'adamv'; did you mean 'Adam"),
        ({"name": "SGD", "params": {"momentm": 0.9}}, "unknown parameter 'momentm'; did you mean 'momentum'.*nesterov"),
        ({"name": "SGD", "lr": 0.1}, "unknown key 'lr'.*goes under"),
        ({"name": "SGD", "params": {"lr": -1.0}}, "optimizer SGD: .*-1.0"),
        ({"name": "SGD", "params": {"lr": "fast"}}, "optimizer SGD"),
        ({"name": "SGD", "params": {"nesterov": True}}, "Nesterov"),
        ({"name": "Adam", "params": {"betas": 0.9}}, "optimizer Adam"),
        (functools.partial(torch.optim.SGD, lr=-1.0), "-1.0"),
        (functools.partial(torch.optim.SGD, momentm=1.0), "did you mean 'momentum'"),
        ("lbfgs", "LBFGS cannot train a sliced model.*closure"),
        (torch.optim.LBFGS, "closure"),
        (lambda params: torch.optim.LBFGS(params, lr=0.1), "closure"),
        (torch.optim.SGD([parameter()], lr=0.1), "an instance of SGD, but each stage has an optimizer of its own"),
        (lambda params: 3, "must return a torch.optim.Optimizer"),
        (3, "an instance of int"),
        ({"name": "SGD", "params": {"groups": [{"weight_decay": 0.0}]}}, '"match"'),
        (
            {"name": "SGD", "params": {"groups": [{"match": "*", "lrr": 1}]}},
            "unknown parameter 'lrr'; did you mean 'lr'",
        ),
        ({"name": "SGD", "params": {"groups": [{"match": "*", "lr": -1}]}}, "Invalid learning rate: -1"),
        ({"name": "SGD", "params": {"groups": [{"match": "re:("}]}}, "no regular expression"),
        ({"name": "SGD", "params": {"groups": [{"match": [3]}]}}, "patterns as strings"),
    ],
)
def test_refusals(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer_spec(spec)


def test_what_is_refused_is_not_offered() -> None:
    with pytest.raises(ConfigError, match=r"unknown optimizer 'lbfg'; known: .*AdamW") as caught:
        build_optimizer_spec("lbfg")
    assert "LBFGS" not in str(caught.value)


def grouped_spec(name: str = "adamw") -> Any:
    groups = [
        {"match": ["*.bias", "1.weight"], "weight_decay": 0.0},
        {"match": r"re:2\..*", "lr": 0.5, "weight_decay": 0.3},
    ]
    return {"name": name, "params": {"lr": 0.1, "weight_decay": 0.2, "groups": groups}}


def test_first_matching_group_wins() -> None:
    named = model_parameters()
    spec = build_optimizer_spec(grouped_spec())
    spec.check(named)
    spec.check([name for name, _ in named])
    optimizer = spec.build(named)
    names = {id(p): name for name, p in named}
    found = [([names[id(p)] for p in g["params"]], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [
        (["0.weight"], 0.1, 0.2),
        (["0.bias", "1.weight", "1.bias", "2.bias"], 0.1, 0.0),
        (["2.weight"], 0.5, 0.3),
    ]


@pytest.mark.parametrize("name", sorted(set(ALL) - {"SparseAdam"}))
def test_stages_have_all_groups_even_empty_ones(name: str) -> None:
    params = {"lr": 0.1, "groups": [{"match": "b*", "lr": 0.2}]}
    p = parameter()
    optimizer = build_optimizer_spec({"name": name, "params": params}).build([("a", p)])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
    p.grad = torch.ones(2, 2)
    optimizer.step()
    assert not torch.equal(p, torch.ones(2, 2))


def test_check_wants_every_pattern_to_match() -> None:
    spec = build_optimizer_spec({"name": "sgd", "params": {"groups": [{"match": ["*.bias", "*.gama"]}]}})
    with pytest.raises(ConfigError, match=r"pattern '\*\.gama' matches no parameter"):
        spec.check(["a.bias", "a.gamma"])


def test_muon_wants_matrices() -> None:
    spec = build_optimizer_spec("muon")
    spec.check([("w", parameter())])
    spec.check([("w", parameter()), ("b", parameter(2).requires_grad_(False))])
    with pytest.raises(
        ConfigError, match=r"Muon takes matrices .* 3 parameter\(s\) are none: 0.bias, 1.weight, 1.bias"
    ):
        spec.check(model_parameters()[:4])
    with pytest.raises(ConfigError, match="optimizer Muon"):
        spec.build([("b", parameter(2))])


def test_only_what_trains_is_optimized() -> None:
    spec = build_optimizer_spec("sgd")
    frozen, free = parameter().requires_grad_(False), parameter()
    assert spec.build([]) is None
    assert spec.build([("a", frozen)]) is None
    assert spec.build([("a", frozen), ("b", free)]).param_groups[0]["params"] == [free]


def rates(spec: Any, steps: int, metrics: dict[str, float] | None = None) -> list[float]:
    made = build_scheduler_spec(spec)
    optimizer = torch.optim.SGD([parameter()], lr=1.0, momentum=0.9)
    scheduler = made.build(optimizer)
    found = []
    for _ in range(steps):
        optimizer.step()
        made.step(scheduler, metrics)
        found.append(optimizer.param_groups[0]["lr"])
    return found


SIMPLE = {
    "ConstantLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
    "ExponentialLR": {"gamma": 0.5},
    "LambdaLR": {"lr_lambda": lambda epoch: 1 / (epoch + 1)},
    "LinearLR": {},
    "MultiStepLR": {"milestones": [1, 3]},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.9},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 10},
    "PolynomialLR": {},
    "StepLR": {"step_size": 2},
}


@pytest.mark.parametrize("name", sorted(SIMPLE))
def test_schedulers_are_torchs(name: str) -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0, momentum=0.9)
    scheduler = getattr(lr_scheduler, name)(optimizer, **SIMPLE[name])
    expected = []
    for _ in range(5):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates({"name": name.lower(), "params": SIMPLE[name]}, 5) == expected
    assert rates(functools.partial(getattr(lr_scheduler, name), **SIMPLE[name]), 5) == expected


def test_no_torch_scheduler_is_left_out() -> None:
    tested = set(SIMPLE) | {"SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}
    assert tested == set(lr_scheduler.__all__) - {"LRScheduler"}


def test_nested_schedulers() -> None:
    inner = [
        {"name": "ConstantLR", "params": {"factor": 0.5, "total_iters": 10}},
        {"name": "ExponentialLR", "params": {"gamma": 0.5}},
    ]
    chained = {"name": "ChainedScheduler", "params": {"schedulers": inner}}
    assert rates(chained, 3) == [0.25, 0.125, 0.0625]
    sequential = {"name": "SequentialLR", "params": {"schedulers": inner, "milestones": [2]}}
    assert rates(sequential, 3) == [0.5, 1.0, 0.5]


def test_plateau_looks_at_the_monitored_metric() -> None:
    spec = {"name": "ReduceLROnPlateau", "params": {"patience": 0, "factor": 0.5}}
    assert rates(spec, 3, {"loss": 1.0}) == [1.0, 0.5, 0.25]
    watched = {**spec, "monitor": "accuracy"}
    assert rates(watched, 2, {"loss": 1.0, "eval_accuracy": 0.5}) == [1.0, 0.5]
    with pytest.raises(ConfigError, match=r"monitors 'accuracy'.*it gave \['loss'\]"):
        rates(watched, 1, {"loss": 1.0})


def test_intervals() -> None:
    assert build_scheduler_spec(None) is None
    assert build_scheduler_spec(lambda optimizer: lr_scheduler.StepLR(optimizer, 2)).interval == "epoch"
    spec = build_scheduler_spec({"name": "StepLR", "params": {"step_size": 2}, "interval": "step"})
    assert spec.interval == "step"
    assert build_scheduler_spec(spec) is spec


def test_scheduler_is_tried_on_the_run_s_optimizer() -> None:
    spec = {"name": "OneCycleLR", "params": {"max_lr": 1.0, "total_steps": 10}}
    with pytest.raises(ConfigError, match="momentum"):
        build_scheduler_spec(spec, optimizer=build_optimizer_spec("adagrad"))
    per_group = {"name": "LambdaLR", "params": {"lr_lambda": [lambda _: 1.0, lambda _: 0.5, lambda _: 0.1]}}
    made = build_scheduler_spec(per_group, optimizer=build_optimizer_spec(grouped_spec()))
    with pytest.raises(ConfigError, match="3"):
        made.build(torch.optim.SGD([parameter()], lr=1.0))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("StepLR", "step_size"),
        ("steplrr", "did you mean 'StepLR'"),
        ({"name": "StepLR", "params": {"step_siz": 2}}, "unknown parameter 'step_siz'; did you mean 'step_size'"),
        ({"name": "StepLR", "params": {"step_size": 0}}, "scheduler StepLR"),
        ({"name": "StepLR", "params": {"step_size": 2}, "interval": "batch"}, "interval must be one of"),
        ({"name": "StepLR", "params": {"step_size": 2}, "monitor": "loss"}, "looks at no metric"),
        ({"name": "ReduceLROnPlateau", "interval": "step"}, "whole epochs"),
        ({"name": "ReduceLROnPlateau", "params": {"factor": 2.0}}, "ReduceLROnPlateau"),
        ({"name": "StepLR", "intervall": "step"}, "unknown key 'intervall'; did you mean 'interval'"),
        (lr_scheduler.StepLR(torch.optim.SGD([parameter()]), 2), "an instance of StepLR"),
        (lambda optimizer: 3, "must return a scheduler"),
    ],
)
def test_scheduler_refusals(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scheduler_spec(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clipping_has_torchs_bits(dtype: torch.dtype, max_norm: float) -> None:
    shapes = [(300, 70), (7,), (), (5, 3, 3), (1000,)]
    grads = [(torch.randn(shape) * 3).to(dtype) for shape in shapes]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = gradient_norms(grads[:2]) + gradient_norms(grads[2:])  # two stages
    total = global_norm(norms)
    assert torch.equal(total, expected)
    scale_gradients(grads[:2], clip_coefficient(total, max_norm))
    scale_gradients(grads[2:], clip_coefficient(total, max_norm))
    assert all(torch.equal(grad, p.grad) for grad, p in zip(grads, parameters, strict=True))


def test_clipping_without_gradients() -> None:
    assert gradient_norms([]) == []
    assert global_norm([]) == 0.0
    scale_gradients([], torch.tensor(0.5))


def test_norms_keep_their_order_across_types() -> None:
    grads = [torch.full((2,), 3.0), torch.ones(4, dtype=torch.float64), torch.full((3,), 2.0)]
    norms = gradient_norms(grads)
    assert [norm.dtype for norm in norms] == [torch.float32, torch.float64, torch.float32]
    assert norms[1] == 2.0

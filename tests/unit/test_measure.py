"""Costs of units; nothing is left behind (S07)."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from torchslicer.graph.fx import trace_fx
from torchslicer.pipeline.measure import measure

X = {"input": torch.randn(8, 16)}


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.ReLU(),
        nn.BatchNorm1d(32),
        nn.Dropout(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(32, 4)),
    )


def test_bytes_are_those_of_tensors() -> None:
    """A linear layer keeps its input, a ReLU its result; what crosses is (8, 32) and (8, 4) floats."""
    measured = measure(trace_fx(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), ["input"]), X)
    assert measured.activation_bytes[:2] == (8 * 16 * 4, 8 * 32 * 4)
    assert measured.activation_bytes[2] == 0  # its input is the ReLU's result, counted there
    assert measured.value_bytes == {"_0": 8 * 32 * 4, "_1": 8 * 32 * 4}
    assert len(measured.time_s) == 3
    assert all(0 < seconds < 5 for seconds in measured.time_s)


def test_nothing_is_left_behind() -> None:
    net = model()
    net[3].eval()
    net[0].bias.requires_grad_(False)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = None if number == 1 else torch.full_like(parameter, number)
    gradients = [parameter.grad for parameter in net.parameters()]
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    flags = [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in net.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    x = X["input"].clone()
    measure(trace_fx(net, ["input"]), X)
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), gradients, strict=True))
    assert [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in net.modules()] == flags
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]  # noqa: NPY002
    assert torch.equal(X["input"], x)
    assert [p.requires_grad for p in net.parameters()].count(False) == 1

"""Which nodes can draw random numbers. Where it is not certain that one cannot, it is taken to."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchslicer.graph.model import SOURCES, ModelGraph, Node

_QUIET_MODULES: frozenset[type[nn.Module]] = frozenset(
    {
        nn.Identity, nn.Linear, nn.Bilinear, nn.Flatten, nn.Unflatten, nn.Embedding, nn.PixelShuffle,
        nn.PixelUnshuffle, nn.Upsample, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.InstanceNorm1d,
        nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.LocalResponseNorm, nn.MaxPool1d, nn.MaxPool2d,
        nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.ReLU, nn.ReLU6,
        nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
        nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Softmax,
        nn.LogSoftmax, nn.GLU, nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ConstantPad2d,
    }
)  # fmt: skip
_QUIET_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.neg, operator.getitem,
    operator.iadd, operator.imul, getattr,
    torch.add, torch.sub, torch.mul, torch.matmul, torch.cat, torch.flatten, torch.relu, torch.tanh, torch.sigmoid,
    torch.reshape, torch.transpose, torch.permute, torch.chunk, torch.split, torch.mean, torch.sum,
    functional.relu, functional.gelu, functional.silu, functional.linear, functional.layer_norm,
    functional.softmax, functional.log_softmax, functional.adaptive_avg_pool2d, functional.max_pool2d,
)  # fmt: skip
_QUIET_IDS = frozenset(map(id, _QUIET_FUNCTIONS))  # a callable of the user need not be hashable
_QUIET_METHODS = frozenset(
    {
        "view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "size", "chunk", "split",
        "unsqueeze", "squeeze", "expand",
    }
)  # fmt: skip


def may_draw(graph: ModelGraph, node: Node) -> bool:
    """Whether *node* may draw from torch's random numbers.

    Example:
        >>> from torchslicer.graph.fx import trace_fx
        >>> graph = trace_fx(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), ["input"])
        >>> [(node.target, may_draw(graph, node)) for node in graph.nodes if node.op == "module"]
        [('0', False), ('1', True)]
    """
    if node.op in SOURCES or node.op == "input":
        return False
    if node.op == "module":
        return not all(_is_quiet(module) for module in graph.modules[node.target].modules())
    if node.op == "method":
        return node.target not in _QUIET_METHODS
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return id(node.target) not in _QUIET_IDS


def _is_quiet(module: nn.Module) -> bool:
    """Whether it is just what its class says: nothing was hooked to it, its `forward` is that of its class."""
    if type(module) not in _QUIET_MODULES and type(module) is not nn.Sequential:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))

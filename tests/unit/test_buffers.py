"""Working on copies of buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchslicer.pipeline.buffers import BufferSnapshot, preserved_buffers


def test_a_forward_pass_moves_the_copies_only() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    tensors = list(model.buffers())
    before = [tensor.clone() for tensor in tensors]
    with preserved_buffers(model):
        model(torch.randn(8, 3))
        assert not torch.equal(model[0].running_mean, before[0])
    assert all(now is old for now, old in zip(model.buffers(), tensors, strict=True))
    assert all(torch.equal(now, old) for now, old in zip(tensors, before, strict=True))


def test_a_snapshot_serves_twice_and_starts_from_that_moment() -> None:
    """Its copies are what the modules work on: the second time goes on from the first."""
    model = nn.BatchNorm1d(3)
    snapshot = BufferSnapshot.take([model])
    model(torch.randn(8, 3))
    with snapshot.in_place():
        assert model.num_batches_tracked == 0
        model(torch.randn(8, 3))
        assert model.num_batches_tracked == 1
    assert model.num_batches_tracked == 1


def test_a_buffer_under_two_names_has_one_copy() -> None:
    model = nn.Module()
    model.register_buffer("one", torch.ones(2))
    model.register_buffer("two", model.one)  # type: ignore[arg-type]
    with preserved_buffers(model):
        assert model.one is model.two


def test_replaced_buffers_and_errors() -> None:
    model = nn.Module()
    model.register_buffer("seen", torch.zeros(2))
    original = model.seen
    with pytest.raises(ZeroDivisionError), preserved_buffers(model):
        model.seen = torch.ones(2) / (1 // 0)
    with preserved_buffers(model):
        model.seen = torch.ones(2)
    assert model.seen is original

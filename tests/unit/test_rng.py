"""Random numbers keyed by (seed, step, micro-batch, unit)."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchslicer.pipeline.rng import mix, preserved_rng, seed_unit, stream_key

CPU = torch.device("cpu")


def test_mix_is_splitmix64() -> None:
    """The first outputs of the published generator for the seeds 0 and 1234567."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317


def test_streams_differ_in_every_part_of_the_key() -> None:
    keys = [stream_key(*parts) for parts in itertools.product((-1, 0, 1), (0, 1, 2), (0, 1, 2))]
    assert len(set(keys)) == 27
    assert all(0 <= key < 1 << 64 for key in keys)


def test_a_unit_draws_the_same_whatever_was_drawn_before() -> None:
    key = stream_key(3, 5, 1)
    seed_unit(key, 7, CPU)
    first = torch.rand(5)
    torch.rand(100)
    seed_unit(key, 8, CPU)
    other = torch.rand(5)
    seed_unit(key, 7, CPU)
    assert torch.equal(torch.rand(5), first)
    assert not torch.equal(other, first)


def test_the_callers_generator_comes_back_even_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), preserved_rng((CPU,)):
        torch.mm(torch.rand(3, 2), torch.rand(3, 2))
    assert torch.equal(torch.get_rng_state(), before)

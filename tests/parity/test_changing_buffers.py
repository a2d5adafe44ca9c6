"""Buffers that the forward pass changes: the same bits however the model is cut, or a refusal."""

from __future__ import annotations

import pytest
import torch

import torchslicer as ts
from tests.support.driver import train_case
from tests.support.models import Case, vectors
from tests.support.nets_buffers import averaged, averaged_twice
from tests.support.oracle import SGD, assert_same_bits


def case(name: str) -> Case:
    make = averaged_twice if "twice" in name else averaged
    return Case(name, lambda dropout: make(replaces="replaced" in name), vectors())


@pytest.mark.parametrize("options", [{}, {"n_micro_batches": 4}, {"n_micro_batches": 4, "schedule": "1f1b"}], ids=str)
@pytest.mark.parametrize("name", ["once", "once, replaced", "twice"])
def test_the_same_bits_for_every_cut(name: str, options: dict[str, object]) -> None:
    """A cut between a buffer's change and its use would hand on what the next micro-batch overwrites."""
    want = train_case(case(name), SGD, n=1, steps=3, **options)
    for n in (2, 3):
        for recompute in ("never", "always"):
            got = train_case(case(name), SGD, n=n, steps=3, recompute=recompute, **options)
            assert_same_bits(got, want, where=f"{name}, n = {n}, recompute {recompute}")


def test_a_buffer_changed_in_two_stages_goes_without_micro_batches_only() -> None:
    changed_twice = case("twice, replaced")
    want = train_case(changed_twice, SGD, n=1, steps=3)
    assert_same_bits(train_case(changed_twice, SGD, n=3, steps=3), want)
    with pytest.raises(ts.SliceError, match=r"buffer '1.mean' changes .* in stages 0 and 1: .*order.*choose cuts="):
        train_case(changed_twice, SGD, n=3, steps=3, n_micro_batches=2)


def test_a_batch_shows_that_a_cut_must_fall_elsewhere() -> None:
    sliced = ts.slice(averaged(replaces=False), n=3)
    before = sliced.plan.unit_starts
    batch = torch.randn(8, 16), torch.randint(4, (8,))
    sliced.train([batch], SGD, "cross_entropy", epochs=1, run_dir=False)
    assert before == (0, 2, 4)
    assert 2 not in sliced.plan.unit_starts
    assert len(sliced.plan.unit_starts) == 3
    named = ts.slice(averaged(replaces=False), cuts=["1.linear"])
    with pytest.raises(ts.SliceError, match=r"no cut may fall before unit 2.*memory of a buffer that changes"):
        named.train([batch], SGD, "cross_entropy", epochs=1, run_dir=False)

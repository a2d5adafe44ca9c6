"""SCENARIOS S31, S32 and S35 as far as they need no network: few micro-batches, a failing stage, views at cuts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.awkward import EXACT
from tests.support.driver import reference_case, sliced_train, train_case
from tests.support.models import MLP
from tests.support.oracle import SGD, assert_close, assert_same_bits

CASES = {case.name: case for case in EXACT}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_s31_fewer_microbatches_than_stages(m: int, schedule: str) -> None:
    """One micro-batch on four stages hung."""
    expected = reference_case(MLP, SGD, steps=2, dtype=torch.float64)
    result = train_case(MLP, SGD, n=4, steps=2, dtype=torch.float64, n_micro_batches=m, schedule=schedule)
    assert_close(result, expected, rtol=1e-9)


class Fails(nn.Module):
    """Raises at its third call in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen >= 3:
            raise ValueError("boom")
        return x


def test_s32_a_stage_that_raises_is_named() -> None:
    """The middle stage raises: the error holds its index, the module and the original error."""
    model = nn.Sequential(nn.Linear(16, 16), Fails(), nn.Linear(16, 4))
    # As packed stages: a tracer would look through forward and never see it raise.
    packed = {"pack": list}
    with pytest.raises(RuntimeError, match="boom") as caught:
        sliced_train(model, MLP.batches(5), SGD, nn.CrossEntropyLoss(), n=3, slice_options=packed)
    assert "stage 1" in str(caught.value)
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, ValueError):
        cause = cause.__cause__
    assert str(cause) == "boom"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_s35_views_and_strides_cross_cuts(n: int) -> None:
    """Chunks, strided and transposed views at a cut keep values and gradients."""
    case = CASES["views"]
    assert_same_bits(train_case(case, SGD, n=n, steps=3), reference_case(case, SGD, steps=3))

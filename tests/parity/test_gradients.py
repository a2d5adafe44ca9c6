"""Every gradient equals the unsplit model's, bit for bit, wherever the model is cut.

The optimizer is SGD with a learning rate of 2**20: the step is exact and so large that equal parameters afterwards mean
equal gradients.
"""

from __future__ import annotations

import pytest
import torch

import torchslicer as ts
from tests.support.awkward import EXACT, RANDOM
from tests.support.driver import reference_case, slice_options, train_case
from tests.support.models import GPT, MOE, TAGGER, UNET, Case, tokens
from tests.support.oracle import GRADIENT_PROBE, SGD, Result, assert_close, assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning")

SMALL_GPT = Case("gpt", lambda dropout: GPT(dropout, layers=1), tokens())
CASES = {case.name: case for case in (*EXACT, UNET, SMALL_GPT, TAGGER, MOE)}
WITHOUT_BATCHNORM = [name for name, case in CASES.items() if not case.batch_norm]
RANDOM_CASES = {case.name: case for case in RANDOM}
# Cuts inside these are forbidden for a reason of the model's own.
MAY_FORBID = {"no_grad", "autocast_block", "weight_norm", "inplace_first", "inplace_add", "inplace_relu", "views"}


def possible_cuts(case: Case) -> list[int]:
    """Return the units before which the model may be cut."""
    graph = ts.slice(case.model(), n=1, **slice_options(case)).graph
    return [unit for unit in range(1, len(graph.units)) if unit not in graph.forbidden]


def train_cut_at(case: Case, *cuts: int, **options: object) -> Result:
    """Train one step with stages that begin at the units *cuts*."""
    strategy = {"strategy": lambda graph, n: list(cuts)}
    steps = 1
    return train_case(case, GRADIENT_PROBE, n=len(cuts) + 1, steps=steps, slice_options=strategy, **options)


@pytest.mark.parametrize("name", CASES)
def test_gradients_at_every_cut(name: str) -> None:
    case = CASES[name]
    expected = reference_case(case, GRADIENT_PROBE, steps=1)
    cuts = possible_cuts(case)
    assert cuts, f"{name} cannot be cut anywhere"
    for cut in cuts:
        result = train_cut_at(case, cut)
        assert_same_bits(result, expected, where=f"{name} cut before unit {cut}", losses=case is not MOE)


@pytest.mark.parametrize("name", CASES)
def test_gradients_with_a_stage_for_every_unit(name: str) -> None:
    case = CASES[name]
    expected = reference_case(case, GRADIENT_PROBE, steps=1)
    result = train_cut_at(case, *possible_cuts(case))
    where = f"{name} in {len(possible_cuts(case)) + 1} stages"
    assert_same_bits(result, expected, where=where, losses=case is not MOE)


@pytest.mark.parametrize("name", [name for name in CASES if name not in MAY_FORBID])
def test_no_cut_is_forbidden_without_need(name: str) -> None:
    case = CASES[name]
    graph = ts.slice(case.model(), n=1, **slice_options(case)).graph
    assert graph.forbidden == {}


@pytest.mark.parametrize("name", WITHOUT_BATCHNORM)
def test_microbatched_gradients_in_float64(name: str) -> None:
    case = CASES[name]
    if name in {"autocast_block", "flow_inside"}:
        pytest.skip("bfloat16 inside, or another branch for each micro-batch: not the function of the whole batch")
    expected = reference_case(case, SGD, steps=3, dtype=torch.float64)
    stages = min(3, len(possible_cuts(case)) + 1)
    result = train_case(case, SGD, n=stages, steps=3, dtype=torch.float64, n_micro_batches=3)
    assert_close(result, expected, rtol=1e-9, where=name)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("name", RANDOM_CASES)
def test_random_numbers_do_not_depend_on_the_cut(name: str, m: int) -> None:
    case = RANDOM_CASES[name]
    whole = train_case(case, SGD, n=1, steps=3, n_micro_batches=m)
    for cut in possible_cuts(case):
        strategy = {"strategy": lambda graph, n, cut=cut: [cut]}
        result = train_case(case, SGD, n=2, steps=3, n_micro_batches=m, slice_options=strategy)
        assert_same_bits(result, whole, where=f"{name} cut before unit {cut}, m={m}")


@pytest.mark.parametrize("name", RANDOM_CASES)
def test_random_numbers_differ_between_steps_and_seeds(name: str) -> None:
    case = RANDOM_CASES[name]
    still = {"name": "SGD", "params": {"lr": 0.0}}
    batches = case.batches(1) * 3
    one = train_case(case, still, n=2, steps=3, batches=batches, seed=0)
    other = train_case(case, still, n=2, steps=3, batches=batches, seed=1)
    assert len({*one.losses, *other.losses}) == 6

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.graphs import chain_graph
from torchslicer.errors import SliceError
from torchslicer.partition import check_num_stages, cuts_from_names, format_bytes, validate_cuts

NAMES = ["conv1", "layer1.0.conv", "layer1.1.conv", "layer2.0.conv", "layer2.1.conv", "layer2", "fc"]


def test_good_cuts_come_back_as_integers() -> None:
    starts = validate_cuts(chain_graph([1] * 4), list(np.array([1, 3])), 3)
    assert starts == (1, 3)
    assert {type(start) for start in starts} == {int}


@pytest.mark.parametrize(
    ("starts", "n", "says"),
    [
        ([1], 3, r"3 stages need 2 cuts .* got 1: \[1\]"),
        ([0, 1, 2], 3, r"3 stages need 2 cuts .* got 3"),
        ([2, 2], 3, r"stage 2 cannot start at unit 2: cuts must ascend from 1 to 3"),
        ([2, 1], 3, r"stage 2 cannot start at unit 1"),
        ([0], 2, r"stage 1 cannot start at unit 0"),
        ([4], 2, r"stage 1 cannot start at unit 4"),
        ([-1], 2, r"stage 1 cannot start at unit -1"),
        ([1.0], 2, r"must be the index of a unit, got 1.0 \(float\)"),
        ([True], 2, r"must be the index of a unit, got True"),
    ],
)
def test_cuts_that_make_no_stages_are_refused(starts: list[Any], n: int, says: str) -> None:
    with pytest.raises(SliceError, match=says):
        validate_cuts(chain_graph([1] * 4), starts, n)


def test_a_forbidden_cut_says_why_and_what_works() -> None:
    graph = chain_graph([1] * 5, forbidden={2: "ReLU writes in place", 3: "ReLU writes in place"})
    with pytest.raises(ValueError, match=r"'layer2'\): ReLU writes in place\.") as caught:
        validate_cuts(graph, [2], 2)
    assert str(caught.value).endswith(
        "The nearest cuts that work are before unit 1 ('layer1') or before unit 4 ('layer4')"
    )


@pytest.mark.parametrize("n", [True, 2.0, "2", None])
def test_the_number_of_stages_is_an_integer(n: Any) -> None:
    with pytest.raises(SliceError, match="must be an integer"):
        check_num_stages(chain_graph([1, 1, 1]), n)


def test_too_many_stages_name_both_numbers_and_the_heaviest_units() -> None:
    with pytest.raises(ValueError, match="Net has 2 units and cannot be cut into 5 non-empty stages") as caught:
        check_num_stages(chain_graph([1, 1024]), 5)
    assert str(caught.value).endswith("heaviest first: 'layer1' 4.0 KiB, 'layer0' 4 B")


def test_too_many_stages_name_the_modules_that_were_kept_whole() -> None:
    with pytest.raises(SliceError, match=r"kept whole because they could not be traced .*: 'layer0' 4 B$"):
        check_num_stages(chain_graph([1, 1024], kinds={0: "opaque"}), 3)


def test_no_stages_are_refused_without_advice_on_splitting() -> None:
    with pytest.raises(
        SliceError, match=r"Net has 1 unit and cannot be cut into 0 non-empty stages: ask for n from 1 to 1$"
    ):
        check_num_stages(chain_graph([1]), 0)


def test_a_model_without_units_cannot_be_cut() -> None:
    with pytest.raises(SliceError, match="Net has 0 units and cannot be cut into 1 "):
        check_num_stages(chain_graph([]), 1)


@pytest.mark.parametrize(
    ("names", "starts"),
    [(["layer2"], (3,)), (["layer1.1", "layer2.1.conv"], (2, 4)), (["layer1", "fc"], (1, 6)), ([], ())],
)
def test_names_cut_before_the_first_unit_inside(names: list[str], starts: tuple[int, ...]) -> None:
    assert cuts_from_names(chain_graph([1] * 7, names=NAMES), names) == starts


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["layr2"], r"Net is or lies in a module 'layr2'; did you mean 'layer2'\?"),
        (["head"], "'head'; its units are conv1, layer1.0.conv, .*, fc"),
        (["conv1.weight"], "'conv1' is one unit and cannot be cut inside"),
        (["layer"], "a module 'layer'; did you mean"),
        (["conv1"], "'conv1' falls before the first unit"),
        (["layer2", "layer2"], "'layer2' is given twice"),
        (["layer2", "layer2.0"], "'layer2' and 'layer2.0' are the same cut: before unit 3"),
        (["layer2", "layer1"], r"not in the order in which the model runs: write \['layer1', 'layer2'\]"),
        ([3], "must be the path of a module"),
        ([""], "must be the path of a module"),
        ("layer2", r"write cuts=\['layer2'\]"),
    ],
)
def test_names_that_are_no_cuts_are_refused(names: Any, says: str) -> None:
    with pytest.raises(SliceError, match=says):
        cuts_from_names(chain_graph([1] * 7, names=NAMES), names)


def test_n_may_be_left_out_or_must_agree() -> None:
    graph = chain_graph([1] * 7, names=NAMES)
    assert cuts_from_names(graph, ["layer2"], 2) == (3,)
    with pytest.raises(SliceError, match="n=4 stages need 3 cuts, got 1"):
        cuts_from_names(graph, ["layer2"], 4)


def test_a_named_cut_may_be_forbidden_too() -> None:
    with pytest.raises(SliceError, match="because it must not"):
        cuts_from_names(chain_graph([1] * 7, names=NAMES, forbidden={3: "because it must not"}), ["layer2"])


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text

from __future__ import annotations

import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest

from torchslicer.schedule import (
    Costs,
    Schedule,
    add_communication,
    draw_svg,
    draw_text,
    forward_only,
    fuse,
    gpipe,
    one_f_one_b,
    simulate,
)

SVG = "{http://www.w3.org/2000/svg}"


def test_gpipe_picture() -> None:
    assert draw_text(gpipe(3, 4)) == (
        "gpipe: 3 stages, 4 micro-batches, bubble 33.3% (idle slots / all slots)\n"
        "rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3\n"
        "rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .\n"
        "rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .\n"
    )


def test_1f1b_picture() -> None:
    assert draw_text(one_f_one_b(3, 4)) == (
        "1f1b: 3 stages, 4 micro-batches, bubble 33.3% (idle slots / all slots)\n"
        "rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3\n"
        "rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .\n"
        "rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .\n"
    )


def test_communication_takes_no_slot() -> None:
    assert draw_text(add_communication(gpipe(3, 4))) == draw_text(gpipe(3, 4))


def test_long_actions_go_on_with_dashes() -> None:
    schedule = gpipe(2, 1)
    costs = Costs(forward=Fraction(1, 2), backward=1, weight=Fraction(1, 2), step=Fraction(1, 2))
    assert draw_text(schedule, simulate(schedule, costs)).splitlines()[1:] == [
        "rank 0 | F0   .    .    .    .    B0   -    -    STEP",
        "rank 1 | .    F0   B0   -    -    STEP .    .    .",
    ]


def test_the_stage_is_named_where_a_rank_holds_several() -> None:
    assert draw_text(fuse(gpipe(2, 1))) == (
        "gpipe: 2 stages, 1 micro-batch, bubble 0.0% (idle slots / all slots)\nrank 0 | 0F0 1F0 1B0 0B0\n"
    )


def test_split_backward_has_both_halves() -> None:
    schedule = Schedule.parse("schedule x stages=1 microbatches=1 ranks=1\n0F0,0I0,0W0,0STEP")
    assert draw_text(schedule).splitlines()[1] == "rank 0 | F0 I0 W0"


def test_wide_pictures_say_that_they_are_cut() -> None:
    lines = draw_text(gpipe(2, 50), max_columns=10).splitlines()
    assert lines[1] == "rank 0 | F0 F1 F2 F3 F4 F5 F6 F7 F8 F9"
    assert lines[-1] == "(the first 10 of 102 slots)"


def test_float_times_are_drawn_to_scale() -> None:
    schedule = gpipe(1, 1)
    row = draw_text(schedule, simulate(schedule, Costs(forward=0.1, backward=0.2, weight=0.1))).splitlines()[1]
    cells = row.partition("| ")[2].split()
    assert (len(cells), cells[0], cells[25]) == (100, "F0", "B0")


def test_nothing_to_draw() -> None:
    schedule = gpipe(1, 1)
    timeline = simulate(schedule, Costs(forward=0, backward=0, weight=0))
    assert draw_text(schedule, timeline).splitlines()[1] == "rank 0 |"
    ET.fromstring(draw_svg(schedule, timeline))


@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(1, 1),
        gpipe(4, 8),
        one_f_one_b(12, 3),
        forward_only(3, 2),
        fuse(one_f_one_b(3, 5)),
        add_communication(one_f_one_b(3, 5)),
        Schedule.parse("schedule x stages=1 microbatches=1 ranks=1\n0F0,0I0,0W0,0STEP"),
    ],
)
def test_svg_is_well_formed_and_complete(schedule: Schedule) -> None:
    root = ET.fromstring(draw_svg(schedule))
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    names = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert [name for name in names if name.startswith("rank")] == [
        f"rank {rank:>{len(str(schedule.num_ranks - 1))}}" for rank in range(schedule.num_ranks)
    ]
    drawn = [title.text or "" for rect in root.iter(f"{SVG}rect") for title in rect.iter(f"{SVG}title")]
    expected = [str(a) for actions in schedule.ranks for a in actions if not a.kind.is_communication]
    assert [text.partition(":")[0] for text in drawn] == expected
    assert "forward" in names


def test_svg_is_self_contained_and_knows_dark_pages() -> None:
    svg = draw_svg(gpipe(2, 2))
    assert "prefers-color-scheme: dark" in svg
    assert "href" not in svg
    assert svg.count("http") == 1  # the name space


def test_svg_stays_inside_its_frame() -> None:
    schedule = one_f_one_b(4, 64)
    timeline = simulate(schedule, Costs(forward=0.001, backward=5.0, weight=[1, 2, 3, 4], step=0.5))
    root = ET.fromstring(draw_svg(schedule, timeline))
    width = float(root.get("width", "nan"))
    assert width <= 4200
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", "nan")) + float(rect.get("width", "nan")) <= width

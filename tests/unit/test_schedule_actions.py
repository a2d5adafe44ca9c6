from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path

import pytest

import torchslicer.schedule as schedule_package
from torchslicer.errors import ScheduleError, UserError
from torchslicer.schedule import Action, ActionKind, Schedule, gpipe


@pytest.mark.parametrize(
    ("text", "kind", "stage", "microbatch"),
    [
        ("2F0", ActionKind.F, 2, 0),
        ("0B7", ActionKind.B, 0, 7),
        ("3I1", ActionKind.I, 3, 1),
        ("3W1", ActionKind.W, 3, 1),
        ("1SEND_F3", ActionKind.SEND_F, 1, 3),
        ("1RECV_F3", ActionKind.RECV_F, 1, 3),
        ("10SEND_B12", ActionKind.SEND_B, 10, 12),
        ("10RECV_B12", ActionKind.RECV_B, 10, 12),
        ("0STEP", ActionKind.STEP, 0, None),
    ],
)
def test_text_form_of_each_kind(text: str, kind: ActionKind, stage: int, microbatch: int | None) -> None:
    action = Action(kind, stage, microbatch)
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2G0", "2f0", "-1F0", "02F0", "2F00", "2F0x", "0STEP1", "2F0,2F1", "1SEND3", "٢F0"],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="action"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("kind", "stage", "microbatch"),
    [
        (ActionKind.F, -1, 0),
        (ActionKind.F, 0, -1),
        (ActionKind.F, 0, None),
        (ActionKind.STEP, 0, 0),
    ],
)
def test_impossible_actions_are_refused(kind: ActionKind, stage: int, microbatch: int | None) -> None:
    with pytest.raises(ScheduleError):
        Action(kind, stage, microbatch)


def test_actions_are_immutable_values() -> None:
    action = Action(ActionKind.F, 0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        action.stage = 1  # type: ignore[misc]
    assert not hasattr(action, "__dict__")
    assert len({action, Action.parse("0F0")}) == 1


def test_schedule_as_text() -> None:
    assert gpipe(2, 2).to_text() == (
        "schedule gpipe stages=2 microbatches=2 ranks=2\n0F0,0F1,0B0,0B1,0STEP\n1F0,1F1,1B0,1B1,1STEP\n"
    )


def test_schedule_text_keeps_boundaries_and_empty_ranks() -> None:
    schedule = Schedule("x", 3, 1, ((Action.parse("0F0"),), (), ()), boundaries=((0, 2), (1, 2)))
    assert schedule.to_text() == "schedule x stages=3 microbatches=1 ranks=3 boundaries=0>2,1>2\n0F0\n\n\n"
    assert Schedule.parse(schedule.to_text()) == schedule
    none = dataclasses.replace(schedule, boundaries=())
    assert Schedule.parse(none.to_text()) == none


def test_schedule_text_forgives_line_ends_and_spaces() -> None:
    text = "schedule x stages=1 microbatches=1 ranks=1\r\n 0F0, 0B0 \r\n\r\n"
    assert Schedule.parse(text).to_text() == "schedule x stages=1 microbatches=1 ranks=1\n0F0,0B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 'schedule NAME"),
        ("0F0", "expected 'schedule NAME"),
        ("schedule x stages=1 microbatches=1", "ranks="),
        ("schedule x stages=0 microbatches=1 ranks=1\n0F0", "stages="),
        ("schedule x stages=1 microbatches=two ranks=1\n0F0", "'two'"),
        ("schedule x stages=1 microbatch=1 ranks=1\n0F0", "did you mean 'microbatches'"),
        ("schedule x stages=1 stages=1 microbatches=1 ranks=1\n0F0", "once"),
        ("schedule x stages=1 microbatches=1 ranks=2\n0F0", "2 ranks, got 1 lines"),
        ("schedule x stages=1 microbatches=1 ranks=1\n0F0\n0B0", "1 ranks, got 2 lines"),
        ("schedule x stages=1 microbatches=1 ranks=1\n0F0,,0B0", "rank 0"),
        ("schedule x stages=2 microbatches=1 ranks=1 boundaries=0-1\n0F0", "PRODUCER>CONSUMER"),
        ("schedule x stages=2 microbatches=1 ranks=1 boundaries=1>0\n0F0", "later one"),
        ("schedule x stages=2 microbatches=1 ranks=1 boundaries=0>2\n0F0", "later one"),
        ("schedule x/y stages=1 microbatches=1 ranks=1\n0F0", "name"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_stages_of_and_placement() -> None:
    schedule = Schedule.parse("schedule x stages=3 microbatches=1 ranks=2\n2F0,0F0\n1F0")
    assert schedule.num_ranks == 2
    assert [schedule.stages_of(rank) for rank in range(2)] == [(0, 2), (1,)]
    assert schedule.placement == (0, 1, 0)
    assert schedule.crossings == ((0, 1), (1, 2))
    for rank in (-1, 2):
        with pytest.raises(ScheduleError, match="from 0 to 1"):
            schedule.stages_of(rank)


def test_schedule_errors_are_user_errors() -> None:
    assert issubclass(ScheduleError, UserError)


def test_the_package_imports_only_the_standard_library_and_errors() -> None:
    assert schedule_package.__file__ is not None
    sources = list(Path(schedule_package.__file__).parent.glob("*.py"))
    assert len(sources) > 5
    imported: set[str] = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source.read_text()))):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    own = {name for name in imported if name.startswith("torchslicer")}
    assert {name.split(".")[1] for name in own} == {"errors", "schedule"}
    assert {name.split(".")[0] for name in imported - own} <= sys.stdlib_module_names

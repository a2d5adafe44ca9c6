"""The order of work of a step, as data: generators, passes, simulator and pictures. Knows no torch."""

from __future__ import annotations

from torchslicer.schedule.actions import Action, ActionKind, Schedule
from torchslicer.schedule.draw import draw_svg, draw_text
from torchslicer.schedule.generators import (
    eager_one_f_one_b,
    forward_only,
    generate,
    gpipe,
    one_f_one_b,
    register_schedule,
    schedule_names,
    unregister_schedule,
)
from torchslicer.schedule.passes import add_communication, fuse, remove_communication, validate
from torchslicer.schedule.simulate import Costs, Timeline, peak_in_flight, simulate

__all__ = [
    "Action",
    "ActionKind",
    "Costs",
    "Schedule",
    "Timeline",
    "add_communication",
    "draw_svg",
    "draw_text",
    "eager_one_f_one_b",
    "forward_only",
    "fuse",
    "generate",
    "gpipe",
    "one_f_one_b",
    "peak_in_flight",
    "register_schedule",
    "remove_communication",
    "schedule_names",
    "simulate",
    "unregister_schedule",
    "validate",
]

"""Pictures of a schedule, made from the same data that the runtime walks: as text and as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from html import escape

from torchslicer.schedule.actions import Action, ActionKind, Schedule
from torchslicer.schedule.order import Number
from torchslicer.schedule.simulate import Costs, Timeline, simulate

_IDLE, _GOES_ON = ".", "-"
_APPROXIMATE_COLUMNS = 100

_SHORTEST_PX, _WIDEST_PX = 26.0, 4000.0
_ROW_PX, _BAR_PX, _LABEL_PX, _MARGIN_PX, _HEAD_PX, _LEGEND_PX = 32, 26, 64, 12, 30, 34
_MIN_TEXT_PX = 15
_LEGEND_ITEM_PX = 170
_LEGEND = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward, inputs",
    ActionKind.W: "backward, weights",
    ActionKind.SEND_F: "send",
    ActionKind.STEP: "optimizer step",
}
# White text has a contrast of at least 4.5 on every fill, on a light page and on a dark one.
_STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; }
.title { font-weight: 600; } .in { fill: #ffffff; text-anchor: middle; }
.idle { fill: #818b98; fill-opacity: .16; }
.F { fill: #0b66d0; } .B { fill: #a8430a; } .I { fill: #a8430a; } .W { fill: #7a3fc0; }
.SEND_F, .SEND_B { fill: #59636e; } .STEP { fill: #1a7f37; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .in { fill: #ffffff; } }
"""


def _slot_timeline(schedule: Schedule) -> Timeline:
    """One slot for every F, B, I and W: the custom of the papers' pictures."""
    split = any(action.kind is ActionKind.W for actions in schedule.ranks for action in actions)
    return simulate(schedule, Costs(weight=1 if split else 0))


def _labels(schedule: Schedule) -> Callable[[Action], str]:
    """``F0`` where the rank says the stage, ``2F0`` where a rank holds several stages."""
    if any(len(schedule.stages_of(rank)) > 1 for rank in range(schedule.num_ranks)):
        return str
    return lambda action: str(action)[len(str(action.stage)) :]


def _row_names(schedule: Schedule) -> list[str]:
    size = len(str(schedule.num_ranks - 1))
    return [f"rank {rank:>{size}}" for rank in range(schedule.num_ranks)]


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {_plural(schedule.num_stages, 'stage')},"
        f" {_plural(schedule.num_microbatches, 'micro-batch', 'es')},"
        f" bubble {float(timeline.bubble_fraction):.1%} (idle slots / all slots)"
    )


def _plural(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else ending}"


def draw_text(schedule: Schedule, timeline: Timeline | None = None, *, max_columns: int = 240) -> str:
    """A grid with a row for each rank and a column for each slot of time; ``.`` is the bubble.

    Without a *timeline* every action takes one slot. An action of several slots goes on with dashes; what takes no
    time is not drawn. Slots beyond *max_columns* are left out, and the last line says so.

    >>> from torchslicer.schedule import gpipe
    >>> print(draw_text(gpipe(2, 2)), end="")
    gpipe: 2 stages, 2 micro-batches, bubble 33.3% (idle slots / all slots)
    rank 0 | F0 F1 .  .  B0 B1
    rank 1 | .  F0 F1 B0 B1 .
    """
    timeline = _slot_timeline(schedule) if timeline is None else timeline
    rows, width = _cells(timeline)
    columns = range(min(width, max_columns))
    size = max((len(cell) for row in rows for column, cell in row.items() if column in columns), default=1)
    lines = [_title(timeline)]
    for name, row in zip(_row_names(schedule), rows, strict=True):
        lines.append(f"{name} | {' '.join(row.get(column, _IDLE).ljust(size) for column in columns)}".rstrip())
    if width > max_columns:
        lines.append(f"(the first {max_columns} of {width} slots)")
    return "\n".join(lines) + "\n"


def _cells(timeline: Timeline) -> tuple[list[dict[int, str]], int]:
    """For each rank what stands in which column, and the number of columns."""
    unit = _slot_length(timeline)
    label = _labels(timeline.schedule)
    rows: list[dict[int, str]] = [{} for _ in timeline.schedule.ranks]
    for rank, action, start, end in timeline.entries():
        first, last = round(start / unit), round(end / unit)
        rows[rank].update(dict.fromkeys(range(first + 1, last), _GOES_ON))
        if last > first:
            rows[rank][first] = label(action)
    return rows, round(timeline.makespan / unit)


def _slot_length(timeline: Timeline) -> Number:
    """The longest slot that all times are multiples of; for floats a share of the makespan."""
    moments = {moment for _, _, start, end in timeline.entries() for moment in (start, end) if moment}
    exact = [Fraction(moment) for moment in moments if not isinstance(moment, float)]
    if len(exact) < len(moments):
        return timeline.makespan / _APPROXIMATE_COLUMNS
    if not exact:
        return 1
    denominator = math.lcm(*(moment.denominator for moment in exact))
    return Fraction(math.gcd(*(int(moment * denominator) for moment in exact)), denominator)


def draw_svg(schedule: Schedule, timeline: Timeline | None = None) -> str:
    """The same picture as one self-contained SVG with a legend, for light and dark pages alike.

    Without a *timeline* every action takes one slot. An optimizer step that takes no time is drawn as a thin bar.

    >>> from torchslicer.schedule import gpipe
    >>> draw_svg(gpipe(2, 2)).startswith("<svg xmlns=")
    True
    """
    timeline = _slot_timeline(schedule) if timeline is None else timeline
    used = {action.kind for _, action, _, _ in timeline.entries()}
    legend = [kind for kind in _LEGEND if kind in used]
    bars = float(timeline.makespan) * _scale(timeline)
    title_px = 7.5 * len(_title(timeline)) + 2 * _MARGIN_PX
    width = max(_LABEL_PX + bars + 2 * _MARGIN_PX, title_px, _MARGIN_PX + _LEGEND_ITEM_PX * min(3, len(legend)))
    height = _HEAD_PX + _ROW_PX * schedule.num_ranks + _LEGEND_PX * math.ceil(len(legend) / 3) + _MARGIN_PX
    title = escape(_title(timeline))
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_MARGIN_PX}" y="20">{title}</text>',
        *_svg_rows(timeline, bars),
        *_svg_bars(timeline),
        *_svg_legend(legend, _HEAD_PX + _ROW_PX * schedule.num_ranks),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _scale(timeline: Timeline) -> float:
    """Pixels for one unit of time: the shortest action can carry its label unless the picture gets too wide."""
    lengths = [float(end - start) for _, _, start, end in timeline.entries() if end > start]
    if not lengths:
        return 1.0
    return min(_SHORTEST_PX / min(lengths), _WIDEST_PX / float(timeline.makespan))


def _svg_rows(timeline: Timeline, bars: float) -> Iterator[str]:
    for rank, name in enumerate(_row_names(timeline.schedule)):
        top = _HEAD_PX + _ROW_PX * rank
        yield f'<text x="{_MARGIN_PX}" y="{top + 18}">{name}</text>'
        yield (
            f'<rect class="idle" x="{_MARGIN_PX + _LABEL_PX}" y="{top}" width="{bars:.1f}" height="{_BAR_PX}" rx="3"/>'
        )


def _svg_bars(timeline: Timeline) -> Iterator[str]:
    scale, label = _scale(timeline), _labels(timeline.schedule)
    for rank, action, start, end in timeline.entries():
        left, top = _MARGIN_PX + _LABEL_PX + float(start) * scale, _HEAD_PX + _ROW_PX * rank
        length = float(end - start) * scale
        if action.kind is ActionKind.STEP and not length:
            length = 4.0
        if not length:
            continue
        yield (
            f'<rect class="{action.kind.value}" x="{left + 0.5:.1f}" y="{top}" width="{max(length - 1, 0.5):.1f}"'
            f' height="{_BAR_PX}" rx="3"><title>{action}: {float(start):g} to {float(end):g}</title></rect>'
        )
        if length >= max(_MIN_TEXT_PX, 7.5 * len(label(action))):
            yield f'<text class="in" x="{left + length / 2:.1f}" y="{top + 17}">{label(action)}</text>'


def _svg_legend(kinds: list[ActionKind], top: int) -> Iterator[str]:
    for index, kind in enumerate(kinds):
        row, column = divmod(index, 3)
        left, y = _MARGIN_PX + _LEGEND_ITEM_PX * column, top + 8 + _LEGEND_PX * row
        yield f'<rect class="{kind.value}" x="{left}" y="{y}" width="14" height="14" rx="3"/>'
        yield f'<text x="{left + 20}" y="{y + 12}">{_LEGEND[kind]}</text>'

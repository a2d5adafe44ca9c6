"""Draw docs/images/cut.svg: how the demo's model is cut, and the schedule of a step; from a real plan and schedule.

    python scripts/pictures.py

The plan is made without measuring, so that the pictures are the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

import torchslicer as ts
from torchslicer.cli.digits import ResidualDigits
from torchslicer.partition.plan import StagePlan
from torchslicer.schedule import draw_svg, generate

FOLDER = Path(__file__).parents[1] / "docs" / "images"
CUTS = ("block2", "down")

BOX_W, GAP, MARGIN, TOP, BOX_H, LINE, ARC = 196, 66, 14, 34, 96, 16, 22
STYLE = """
.box { fill: #0b66d0; fill-opacity: .09; stroke: #0b66d0; stroke-width: 1.2; }
.wire { fill: none; stroke: #a8430a; stroke-width: 1.6; marker-end: url(#tip); } .tip { fill: #a8430a; }
.cut { fill: none; stroke: #818b98; stroke-width: 1.2; stroke-dasharray: 4 4; }
.small { font-size: 11px; } .mid { text-anchor: middle; }
@media (prefers-color-scheme: dark) { .box { stroke: #58a6ff; fill: #58a6ff; fill-opacity: .16; }
.wire { stroke: #f0883e; } .tip { fill: #f0883e; } }
"""
MARKER = (
    '<marker id="tip" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
    '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
)


def left(stage: int) -> int:
    """Left edge of a stage's box."""
    return MARGIN + stage * (BOX_W + GAP)


def stage_box(stage: StagePlan) -> Iterator[str]:
    """Draw one stage: its number, its units and what it holds."""
    x, middle = left(stage.index), left(stage.index) + BOX_W // 2
    lines = [
        f"{stage.units[0]} ..",
        f".. {stage.units[-1]}",
        f"{stage.num_parameters:,} parameters",
    ]
    yield f'<rect class="box" x="{x}" y="{TOP}" width="{BOX_W}" height="{BOX_H}" rx="6"/>'
    yield f'<text class="title mid" x="{middle}" y="{TOP + 22}">stage {stage.index}</text>'
    for number, line in enumerate(lines):
        yield f'<text class="small mid" x="{middle}" y="{TOP + 44 + LINE * number}">{escape(line)}</text>'


def cut_line(cut: int) -> Iterator[str]:
    """Draw the line between two stages, where the model is cut."""
    x, wire = left(cut) - GAP // 2, TOP + BOX_H // 2
    yield f'<path class="cut" d="M{x} {TOP - 12} V{wire - 22} M{x} {wire + 4} V{TOP + BOX_H + ARC + 8}"/>'
    yield f'<text class="small mid" x="{x}" y="{TOP - 18}">cut</text>'


def wires(plan: ts.Plan) -> Iterator[str]:
    """Draw what crosses the cuts: to the next stage straight, further on as an arc below the stages between."""
    counts: dict[tuple[int, int], list[str]] = {}
    for value in plan.boundaries:
        for consumer in value.consumers:
            counts.setdefault((value.producer, consumer), []).append(value.name)
    nearest_first = sorted(counts.items(), key=lambda item: item[0][1] - item[0][0])
    for depth, ((producer, consumer), names) in enumerate(nearest_first):
        start, end, label = left(producer) + BOX_W, left(consumer), escape(", ".join(names))
        if consumer == producer + 1:
            y = TOP + BOX_H // 2
            yield f'<path class="wire" d="M{start} {y} H{end - 7}"/>'
            yield f'<text class="small mid" x="{(start + end) / 2}" y="{y - 8}">{label}</text>'
            continue
        y, middle = TOP + BOX_H + ARC + 6 * depth, (start + end) / 2
        yield f'<path class="wire" d="M{start - 40} {TOP + BOX_H} V{y} H{end + 40} V{TOP + BOX_H + 7}"/>'
        yield f'<text class="small mid" x="{middle}" y="{y + 15}">{label}: a skip connection over both cuts</text>'


def picture(plan: ts.Plan, schedule_svg: str) -> str:
    """Put the cut above the schedule, in one file."""
    width = left(plan.num_stages) - GAP + MARGIN
    height = TOP + BOX_H + 68
    found = re.fullmatch(r'<svg [^>]*width="(\d+)" height="(\d+)"[^>]*>\n(.*)</svg>\n', schedule_svg, re.DOTALL)
    if found is None:
        raise SystemExit("the schedule's SVG has another form than this script expects")
    width, total = max(width, int(found[1])), height + int(found[2])
    title = f"{plan.model} cut into {plan.num_stages} stages, and the schedule of one step"
    body = [line for stage in plan.stages for line in stage_box(stage)]
    body += [line for cut in range(1, plan.num_stages) for line in cut_line(cut)]
    size = f'width="{width}" height="{total}" viewBox="0 0 {width} {total}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            MARKER,
            *body,
            *wires(plan),
            f'<g transform="translate(0 {height})">',
            re.sub(r"<title>[^<]*</title>\n", "", found[3], count=1).rstrip(),
            "</g>",
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write the pictures."""
    plan = ts.slice(ResidualDigits(), cuts=CUTS).plan
    FOLDER.mkdir(parents=True, exist_ok=True)
    drawn = draw_svg(generate("1f1b", plan.num_stages, 6))
    (FOLDER / "cut.svg").write_text(picture(plan, drawn), encoding="utf-8")
    for name in ("gpipe", "1f1b"):
        (FOLDER / f"{name}.svg").write_text(draw_svg(generate(name, 4, 8)), encoding="utf-8")


if __name__ == "__main__":
    main()

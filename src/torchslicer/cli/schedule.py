"""``torchslicer schedule``: draw the order of work of a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from torchslicer.schedule import Schedule, draw_svg, draw_text, generate, peak_in_flight


@click.command()
@click.argument("name")
@click.option("-n", "--n", "n", type=int, default=4, show_default=True, help="Number of stages.")
@click.option("-m", "--microbatches", type=int, default=8, show_default=True, help="Number of micro-batches.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the picture to this file.")
@click.option("--csv/--text", "as_csv", default=False, help="Print each rank's list of actions instead of a picture.")
def schedule(*, name: str, n: int, microbatches: int, svg: Path | None, as_csv: bool) -> None:
    """Draw a schedule (gpipe, 1f1b, eager-1f1b, plain): who does what when, the bubble, the micro-batches in flight.

    F is a forward, B a backward, both taken to be of the same length; a dot is a slot in which a rank waits.
    """
    made = named_schedule(name, n, microbatches)
    click.echo(made.to_text() if as_csv else described(made), nl=False)
    if svg is not None:
        svg.write_text(draw_svg(made), encoding="utf-8")
        click.echo(f"wrote {svg}", err=True)


def named_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Return a schedule by name; ``plain`` is a batch in one piece.

    Raises:
        ScheduleError: The name is unknown, or a number is not positive.
    """
    if name == "plain":
        return generate("gpipe", num_stages, 1)
    return generate(name, num_stages, num_microbatches)


def described(made: Schedule) -> str:
    """Return the drawing and, for each stage, the most micro-batches that it holds activations of."""
    return draw_text(made) + "\n".join(_facts(made)) + "\n"


def _facts(made: Schedule) -> Iterator[str]:
    peaks = [peak_in_flight(made, stage) for stage in range(made.num_stages)]
    yield f"peak in flight, stage by stage: {', '.join(map(str, peaks))} micro-batches"

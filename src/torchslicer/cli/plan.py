"""``torchslicer plan``: show where a model would be cut."""

from __future__ import annotations

from pathlib import Path

import click

from torchslicer.api import slice as slice_model
from torchslicer.cli.reference import build_model, example_inputs, importable


@click.command()
@click.argument("reference", metavar="PACKAGE.MODULE:BUILDER")
@click.option("-n", "--n", "n", type=int, help="Number of stages; 2, or what --cuts makes.")
@click.option("--strategy", default="uniform", show_default=True, help="uniform, parameters, memory or time.")
@click.option("--cuts", help="Names of modules to cut before, with commas: layer2,layer3.")
@click.option("--example", "examples", multiple=True, metavar="SHAPE[:DTYPE]", help="An input, such as 4,3,32,32.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    *, reference: str, n: int | None, strategy: str, cuts: str | None, examples: tuple[str, ...], as_json: bool
) -> None:
    """Show where a model is cut, and what each stage holds.

    BUILDER is a function or class to be called without arguments, or a module; the current folder is looked in first.
    Give --example once for each input: it lets the time of each unit be measured, the sizes of what crosses the cuts
    be shown, and the graph be compared with the model.
    """
    names = None if cuts is None else [name.strip() for name in cuts.split(",")]
    with importable(Path.cwd()):
        model = build_model(reference)
        sliced = slice_model(model, strategy, n, cuts=names, example=example_inputs(examples))
    click.echo(sliced.plan.to_json() if as_json else str(sliced.plan))

"""The command line: ``torchslicer demo | plan | schedule | worker | selftest | certs``.

A user's error is one message on stderr and the error's exit code (docs/errors.md); ``torchslicer --debug ...`` shows
the traceback instead.
"""

from __future__ import annotations

import errno
from typing import Any

import click
import torch

import torchslicer
from torchslicer.cli.certs import certs
from torchslicer.cli.demo import demo
from torchslicer.cli.plan import plan
from torchslicer.cli.schedule import schedule
from torchslicer.cli.selftest import selftest
from torchslicer.cli.worker import worker
from torchslicer.errors import TorchSlicerError

__all__ = ["main"]


_INTERRUPTED = 130
"""What shells use for a program that Ctrl-C has ended."""


class _Commands(click.Group):
    """Turns errors that were raised on purpose into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("torchslicer: interrupted", err=True)
            ctx.exit(_INTERRUPTED)
        except (TorchSlicerError, OSError) as error:
            if ctx.params["debug"] or getattr(error, "errno", None) == errno.EPIPE:
                raise
            click.echo(f"torchslicer: {error}", err=True)
            ctx.exit(error.exit_code if isinstance(error, TorchSlicerError) else 1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    torchslicer.__version__, message=f"torchslicer {torchslicer.__version__} (PyTorch {torch.__version__})"
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(*, debug: bool) -> None:  # _Commands reads it from the context
    """Cut a PyTorch model into stages and train it end to end, exactly as if it were whole."""


main.add_command(demo)
main.add_command(plan)
main.add_command(schedule)
main.add_command(certs)
main.add_command(worker)
main.add_command(selftest)

"""``python -m torchslicer.cli``: the command line where no script is installed."""

from __future__ import annotations

from torchslicer.cli import main

main(prog_name="torchslicer")

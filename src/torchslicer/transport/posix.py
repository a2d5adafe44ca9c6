"""What only POSIX systems have: local training does without, so that it works on Windows."""

from __future__ import annotations

import importlib.util
from typing import Any

FCNTL: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") is not None else None
"""The module `fcntl`, or None."""

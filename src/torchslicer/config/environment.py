"""What the environment says that is no setting: a secret, and an opt-in that no file may give."""

from __future__ import annotations

import os

from torchslicer.config.secret import Secret

JOIN_VARIABLE = "TORCHSLICER_JOIN"
INSECURE_VARIABLE = "TS_INSECURE"


def join_string() -> Secret | None:
    """Return the join string in ``TORCHSLICER_JOIN``, if there is one."""
    text = os.environ.get(JOIN_VARIABLE, "").strip()
    return Secret(text) if text else None


def insecure_opt_in() -> bool:
    """Whether ``TS_INSECURE`` is 1: the environment's half of the opt-in to plain text."""
    return os.environ.get(INSECURE_VARIABLE, "").strip() == "1"

"""What the environment says that is no setting: a secret, and an opt-in that no file may give."""

from __future__ import annotations

import os

from torchslicer.config.layers import LEGACY_ENVIRONMENT, PREFIX
from torchslicer.config.secret import Secret

JOIN_VARIABLE = "TORCHSLICER_JOIN"
INSECURE_VARIABLE = "TS_INSECURE"
CONFIG_VARIABLE = "EXPERIMENT_CONFIG"


def is_setting(name: str) -> bool:
    """Whether a variable says where a configuration is, or how a process of this library reaches others.

    >>> [is_setting(name) for name in ("TORCHSLICER_NETWORK__DEVICE", "WORKER_ADDRESS", "EXPERIMENT_CONFIG", "HOME")]
    [True, True, True, False]
    """
    of_network = LEGACY_ENVIRONMENT.get(name, "").startswith("network.")
    return name.startswith(PREFIX) or name == CONFIG_VARIABLE or of_network


def join_string() -> Secret | None:
    """Return the join string in ``TORCHSLICER_JOIN``, if there is one."""
    text = os.environ.get(JOIN_VARIABLE, "").strip()
    return Secret(text) if text else None


def insecure_opt_in() -> bool:
    """Whether ``TS_INSECURE`` is 1: the environment's half of the opt-in to plain text."""
    return os.environ.get(INSECURE_VARIABLE, "").strip() == "1"

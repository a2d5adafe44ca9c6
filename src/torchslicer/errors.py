"""Every error that TorchSlicer raises on purpose.

::

    TorchSlicerError
    +-- UserError (ValueError)            what was asked cannot be done; nothing has started
    |   +-- SliceError                    the model cannot be cut as asked
    |   |   +-- TraceError                no way was found to see the model's structure
    |   |   +-- VerificationError         the graph does not compute what the model computes
    |   +-- ConfigError                   a setting is unknown, impossible or contradictory
    |   +-- DataError                     a batch has a form that cannot be used
    |   +-- ScheduleError                 a list of actions is not a valid schedule
    |   +-- SecurityError                 not safe enough to start, or the other side is not who it should be
    +-- RunError (RuntimeError)           something failed while a run was under way
        +-- StageError                    a stage raised; the original error is its __cause__
        +-- CallbackError                 a callback raised; the original error is its __cause__
        +-- NonFiniteLossError            the loss became NaN or infinite

A message says *where*, what was *expected*, what was *found*, and what to *change*.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TorchSlicerError(Exception):
    """Root of all errors of this library."""

    exit_code = 1


class UserError(TorchSlicerError, ValueError):
    """What was asked cannot be done; nothing has been started."""

    exit_code = 2


class SliceError(UserError):
    """The model cannot be cut as asked."""

    exit_code = 3


class TraceError(SliceError):
    """No way was found to see the structure of the model."""


class VerificationError(SliceError):
    """The graph does not compute what the model computes."""


class ConfigError(UserError):
    """A setting is unknown, impossible or contradictory."""


class DataError(UserError):
    """A batch has a form that cannot be used."""


class ScheduleError(UserError):
    """A list of actions is not a valid schedule."""


class SecurityError(UserError):
    """Not safe enough to start, or the other side is not who it should be. Holds no secret."""

    exit_code = 4


class RunError(TorchSlicerError, RuntimeError):
    """Something failed while a run was under way."""

    exit_code = 10


class StageError(RunError):
    """A stage raised; the original error is the ``__cause__``."""

    exit_code = 11


class CallbackError(RunError):
    """A callback raised; the original error is the ``__cause__``."""

    exit_code = 12


class NonFiniteLossError(RunError):
    """The loss became NaN or infinite."""

    exit_code = 13


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to *word*, or an empty string.

    >>> nearest("momentm", ["lr", "momentum"])
    "; did you mean 'momentum'?"
    """
    names = list(known)
    folded = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), folded, n=1)
    return f"; did you mean '{folded[matches[0]]}'?" if matches else ""

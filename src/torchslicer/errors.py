"""Every error that TorchSlicer raises on purpose.

::

    TorchSlicerError
    +-- UserError (ValueError)            what was asked cannot be done; nothing has started
    |   +-- SliceError                    the model cannot be cut as asked
    |   |   +-- TraceError                no way was found to see the model's structure
    |   |   +-- VerificationError         the graph does not compute what the model computes
    |   +-- ConfigError                   a setting is unknown, impossible or contradictory
    |   |   +-- UnknownArgumentError      (TypeError) a call has a keyword that it does not take
    |   +-- DataError                     a batch has a form that cannot be used
    |   +-- ScheduleError                 a list of actions is not a valid schedule
    |   +-- ShippingError                 a part of the model cannot be sent, or is not accepted where it arrives
    |   +-- SecurityError                 not safe enough to start, or the other side is not who it should be
    +-- RunError (RuntimeError)           something failed while a run was under way
        +-- StageError                    a stage raised; the original error is its __cause__
        +-- CallbackError                 a callback raised; the original error is its __cause__
        +-- NonFiniteLossError            the loss became NaN or infinite
        +-- WorkerFailureError            a worker died, went silent or could not go on
        +-- ProtocolError                 a control message is malformed or out of place
        +-- TransportError                a channel or listener cannot do its work
            +-- FrameError                what came over the wire is no valid frame, or not the one expected
            +-- PeerClosedError           the other side closed the channel or went away
            +-- DeadlineError             nothing came, or could be sent, within the time given

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


class UnknownArgumentError(ConfigError, TypeError):
    """A call has a keyword that it does not take; a `TypeError` as well, since Python raises one for that."""


class DataError(UserError):
    """A batch has a form that cannot be used."""


class ScheduleError(UserError):
    """A list of actions is not a valid schedule."""


class ShippingError(UserError):
    """A part of the model cannot be sent to a worker, or is not accepted by the worker that it reaches."""

    located = False
    """Whether the message says already where in the model."""


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


class WorkerFailureError(RunError):
    """A worker died, went silent or could not go on."""

    exit_code = 14


class ProtocolError(RunError):
    """A control message is malformed or out of place."""

    exit_code = 15


class TransportError(RunError):
    """A channel or listener cannot do its work."""

    exit_code = 16


class FrameError(TransportError):
    """What came over the wire is no valid frame, or not the one expected."""


class PeerClosedError(TransportError):
    """The other side closed the channel or went away."""


class DeadlineError(TransportError):
    """Nothing came, or could be sent, within the time given."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to *word*, or an empty string.

    >>> nearest("momentm", ["lr", "momentum"])
    "; did you mean 'momentum'?"
    """
    names = list(known)
    folded = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), folded, n=1)
    return f"; did you mean '{folded[matches[0]]}'?" if matches else ""

"""The files of a run: ``metrics.jsonl`` and ``resolved_config.yaml``. ``docs/run-log.md`` describes them.

The log must survive what the run does not (a killed process leaves at most one torn last line) and must never stop
the run (a full disk costs log lines).
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchslicer.errors import DataError
from torchslicer.events import EpochStarted, Event, to_record

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA = 1
METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "resolved_config.yaml"

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXT_FIELDS = frozenset({"type", "time", "status", "run_id", "schedule", "error"})
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger("torchslicer.runlog")


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class RunLog:
    """Writes the records of a run into its folder; an :class:`~torchslicer.events.Observer`.

    Each record is one ``write`` call, so a record is in the file as soon as its event is over. The folder is for its
    owner only (0700, files 0600). A folder that holds a log already is continued.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, RunLog(folder) as log:
    ...     log.write({"type": "step", "step": 0, "loss": float("nan")})
    ...     read_metrics(log.path)[0]["loss"]
    nan
    """

    def __init__(self, directory: str | os.PathLike[str], *, now: Callable[[], datetime] = _utc_now) -> None:
        """Make the folder and open the log.

        Args:
            directory: The run's folder.
            now: Gives the time of a record, in UTC.

        Raises:
            OSError: The folder cannot be made or written to, unless only the disk is full.
        """
        self.directory = Path(directory)
        self.path = self.directory / METRICS_FILE
        self.dropped = 0
        self._now = now
        self._warned = False
        self._file: int | None = None
        self._cut: int | None = None
        try:
            self._open()
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            self._warn(error)

    def _open(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _whole_lines(file))
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def on_event(self, event: Event, /) -> None:
        """Write the event, if the log has a record for it."""
        if not isinstance(event, EpochStarted):
            self.write(to_record(event))

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; ``schema`` and ``time`` are added. What cannot be written is counted in ``dropped``.

        Raises:
            TypeError: The record holds something other than numbers, text, None, lists and mappings.
        """
        head = {"schema": SCHEMA, "type": record["type"], "time": self._now().isoformat(timespec="microseconds")}
        line = json.dumps(head | _encode(record), allow_nan=False).encode("ascii") + b"\n"
        try:
            self._append(line)
        except OSError as error:
            self.dropped += 1
            self._warn(error)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            raise OSError(errno.EBADF, "the log is not open")
        self._remove_piece(self._file)
        written = os.write(self._file, line)
        if written != len(line):
            self._cut = os.lseek(self._file, 0, os.SEEK_CUR) - written
            self._remove_piece(self._file)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _remove_piece(self, file: int) -> None:
        """Remove the piece of a record that did not fit, since no later line may follow it."""
        if self._cut is not None:
            os.ftruncate(file, self._cut)
            self._cut = None

    def write_config(self, text: str) -> None:
        """Write the settings of the run, as YAML text, to ``resolved_config.yaml``; it appears whole or not at all."""
        target = self.directory / CONFIG_FILE
        temporary = target.with_suffix(".tmp")
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as stream:
                stream.write(text)
            temporary.replace(target)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            reason = error.strerror or error
            _log.warning("%s: the run log cannot be written (%s); training goes on without it", self.directory, reason)
        self._warned = True

    def close(self) -> None:
        """Close the file. Records written later are dropped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self.dropped:
            _log.info("%s: %d records of the run log were dropped", self.directory, self.dropped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _whole_lines(file: int) -> int:
    """Return the size of the file without a torn last line, which the process that wrote it did not survive."""
    size = os.fstat(file).st_size
    position, step = size, 4096
    while position > 0:
        start = max(0, position - step)
        found = os.pread(file, position - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _encode_float(float(value))
    raise TypeError(f"a run log record holds numbers, text, None, lists and mappings, got {type(value).__name__}")


def _encode_float(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a run log, the last line left out if it is torn.

    Args:
        path: The file ``metrics.jsonl``, or the run's folder.

    Returns:
        The records in the order of writing; ``"nan"``, ``"inf"`` and ``"-inf"`` are floats again.

    Raises:
        DataError: A line other than the last is torn, or a record has another schema version.
        OSError: The file cannot be read.
    """
    file = Path(path)
    file = file / METRICS_FILE if file.is_dir() else file
    lines = file.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None and number == len(lines):
            break
        records.append(_checked(record, f"{file}, line {number}"))
    return records


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _checked(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object, found a torn or foreign line; repair or remove this line")
    if record.get("schema") != SCHEMA:
        found = record.get("schema")
        raise DataError(f"{place}: expected schema version {SCHEMA}, got {found!r}; read it as its writer would")
    return {key: value if key in _TEXT_FIELDS else _decode(value) for key, value in record.items()}


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value

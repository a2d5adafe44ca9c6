"""Secrets in files: written for the owner only, read only where nobody else can."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from torchslicer.errors import SecurityError

_MAX_BYTES = 64 * 1024


def read_private(path: str | os.PathLike[str], *, what: str) -> bytes:
    """Read a small file that only its owner can read.

    Files of root may be readable for the group, which is how Kubernetes and packages give keys to a service. Links are
    followed, since Kubernetes mounts secrets as links; what counts is the file that was opened.

    Raises:
        SecurityError: The file cannot be read, is no ordinary file, is too large, or others can read it.
    """
    data, status = _read(path, what)
    shared = 0o037 if status.st_uid == 0 and os.geteuid() != 0 else 0o077
    if status.st_mode & shared:
        mode = stat.S_IMODE(status.st_mode)
        raise SecurityError(
            f"{what} {path}: expected a file that only its owner can read, got mode {mode:04o}; run `chmod 600` on it"
        )
    return data


def read_public(path: str | os.PathLike[str], *, what: str) -> bytes:
    """Read a small file that is no secret, such as a certificate.

    Raises:
        SecurityError: The file cannot be read, is no ordinary file or is too large.
    """
    return _read(path, what)[0]


def write_private(directory: str | os.PathLike[str], files: Mapping[str, bytes]) -> list[Path]:
    """Write new files (0600) into a folder of the owner alone (0700, made if it is missing).

    Nothing is overwritten, no link is followed, and either all files are there afterwards or none.

    Raises:
        SecurityError: A file exists, the folder is open to others, or it cannot be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SecurityError(f"folder {folder}: cannot be used: {error.strerror}") from error
    try:
        _check_folder(folder, os.fstat(descriptor))
        _write_all(folder, descriptor, files)
    finally:
        os.close(descriptor)
    return [folder / name for name in files]


def _check_folder(folder: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise SecurityError(f"folder {folder}: belongs to another user; choose a folder of your own")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise SecurityError(
            f"folder {folder}: expected mode 0700, got {mode:04o}; run `chmod 700` on it or choose another"
        )


def _write_all(folder: Path, descriptor: int, files: Mapping[str, bytes]) -> None:
    written: list[str] = []
    try:
        for name, data in files.items():
            _write_one(name, data, descriptor, written)
    except OSError as error:
        for name in written:
            os.unlink(name, dir_fd=descriptor)
        if isinstance(error, FileExistsError):
            raise SecurityError(
                f"{folder / name}: exists already and is never overwritten; choose another folder or remove it"
            ) from error
        raise SecurityError(f"{folder / name}: cannot be written: {error.strerror}") from error


def _write_one(name: str, data: bytes, folder: int, written: list[str]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
        written.append(name)
        os.fchmod(file.fileno(), 0o600)  # whatever the umask took away
        file.write(data)


def _read(path: str | os.PathLike[str], what: str) -> tuple[bytes, os.stat_result]:
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise SecurityError(f"{what} {os.fspath(path)!r}: cannot be read: {reason}") from error
    try:
        status = os.fstat(descriptor)
        data = _read_bounded(descriptor) if stat.S_ISREG(status.st_mode) else None
    finally:
        os.close(descriptor)
    if data is None or len(data) > _MAX_BYTES:
        raise SecurityError(f"{what} {path}: expected an ordinary file of at most {_MAX_BYTES} bytes")
    return data, status


def _read_bounded(descriptor: int) -> bytes:
    pieces = iter(lambda: os.read(descriptor, _MAX_BYTES), b"")
    data = b""
    for piece in pieces:
        data += piece
        if len(data) > _MAX_BYTES:
            break
    return data

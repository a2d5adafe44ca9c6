"""What users write on the command line: references to code, and shapes of example inputs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchslicer.errors import UserError, nearest

_FORM = "expected package.module:builder, such as models.resnet:build"
_SHAPE = re.compile(r"(?P<sizes>\d+(?:,\d+)*)(?::(?P<dtype>\w+))?")


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let modules in *folder* be imported, as ``python -m`` does."""
    path = str(folder)
    sys.path.insert(0, path)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)


def build_model(reference: str) -> nn.Module:
    """Return the model that *reference* stands for: a module, or what a function or class without arguments makes.

    Raises:
        UserError: The reference leads nowhere, its code fails, or the result is no module.

    Example:
        >>> build_model("torch.nn:Identity")
        Identity()
    """
    found = _find(reference)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise UserError(f"{reference}: expected a function, a class or a module, found {type(found).__name__}")
    try:
        model = found()
    except Exception as error:  # user code may raise anything; it is passed on with the reference's name
        raise UserError(f"{reference}: calling it without arguments failed: {_text(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{reference}: expected it to return a torch.nn.Module, got {type(model).__name__}")
    return model


def _find(reference: str) -> Any:
    module_name, colon, path = reference.partition(":")
    if not (colon and path and module_name) or module_name.startswith("."):
        raise UserError(f"{reference!r}: {_FORM}")
    found: Any = _import(module_name, reference)
    for name in path.split("."):
        if not hasattr(found, name):
            names = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise UserError(f"{reference}: there is no '{name}' in {module_name}{nearest(name, names)}")
        found = getattr(found, name)
    return found


def _import(name: str, reference: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UserError(
                f"{reference}: there is no module '{error.name}'; {_FORM}. Looked in the current folder "
                f"({Path.cwd()}) and where Python finds packages"
            ) from error
        raise UserError(f"{reference}: importing '{name}' failed: {_text(error)}") from error
    except Exception as error:  # user code may raise anything; it is passed on with the reference's name
        raise UserError(f"{reference}: importing '{name}' failed: {_text(error)}") from error


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def example_inputs(specs: Sequence[str]) -> Any:
    """Return random inputs for *specs*, ``"4,3,32,32"`` or ``"4,128:int64"`` (zeros, for whole numbers); None for none.

    Raises:
        UserError: A spec has another form, or the dtype is unknown.

    Example:
        >>> example_inputs(["2,3:int64"])
        tensor([[0, 0, 0],
                [0, 0, 0]])
    """
    inputs = [_example_input(spec) for spec in specs]
    return inputs[0] if len(inputs) == 1 else tuple(inputs) or None


def _example_input(spec: str) -> torch.Tensor:
    match = _SHAPE.fullmatch(spec.replace(" ", ""))
    if match is None:
        raise UserError(
            f"--example {spec!r}: expected sizes and, if it is not float32, a dtype: 4,3,32,32 or 4,128:int64"
        )
    shape = [int(size) for size in match["sizes"].split(",")]
    dtype = _dtype(match["dtype"] or "float32", spec)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _dtype(name: str, spec: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = [word for word in dir(torch) if isinstance(getattr(torch, word), torch.dtype)]
        raise UserError(f"--example {spec!r}: '{name}' is no dtype of torch{nearest(name, known)}")
    return found

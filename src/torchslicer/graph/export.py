"""The last way in: `torch.export`, for models whose own forward pass `torch.fx` cannot trace.

The model is run once on stand-ins for the example inputs, and every operation that reaches the dispatcher is recorded,
with the sizes of batch and sequence left open. The record is turned into nodes and units by `graph.exported`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from torchslicer.errors import SliceError, TraceError
from torchslicer.graph.auxloss import _collector
from torchslicer.graph.exported import ExportConverter
from torchslicer.graph.model import ModelGraph

_exporting = threading.RLock()
"""torch.export changes the model and process-wide state while it runs, and so does this module."""

_NOISY_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export")
_HARMLESS = (
    "The tensor attributes? .* assigned during export",  # they are put back by _unchanged
    "Detected .* fake tensors? that (is|are) still alive",  # the same
    "Attempted to insert a get_attr Node",
)


def trace_export(model: nn.Module, inputs: Mapping[str, Any]) -> ModelGraph:
    """Trace *model*, in the mode that it is in, with `torch.export` on the example *inputs*.

    The graph runs on the model's own parameters and buffers. Sizes of the batch (and of the sequence, for token ids)
    may differ from the example's; what could not be left open is checked whenever the graph runs.

    Args:
        model: The model; nothing of it is changed.
        inputs: Example inputs by name.

    Raises:
        TraceError: The model cannot be exported, or not without a loss.

    Example:
        >>> graph = trace_export(nn.Linear(3, 2), {"input": torch.ones(4, 3)})
        >>> [unit.name for unit in graph.units]
        ['weight']
    """
    _refuse_backward_hooks(model)
    variants = _variants(inputs)
    for example, shapes in variants[:-1]:
        with contextlib.suppress(_FixedSizesError):
            return _attempt(model, example, shapes, strict=True)
    return _attempt(model, *variants[-1], strict=False)


class _FixedSizesError(TraceError):
    """An attempt failed that might succeed with fewer open sizes."""


def _attempt(model: nn.Module, example: dict[str, Any], shapes: dict[str, Any], *, strict: bool) -> ModelGraph:
    try:
        return ExportConverter(model, _exported(model, example, shapes), example, strict=strict).convert()
    except SliceError:
        raise
    except Exception as error:  # user code runs inside, and torch.export raises many kinds; the reason is passed on
        kind = _FixedSizesError if strict and "data-dependent" not in str(error) else TraceError
        raise kind(f"torch.export: {_reason(error)}{_hint(model, error)}") from error


def _hint(model: nn.Module, error: Exception) -> str:
    """Say what to do about the key-value cache that Hugging Face models return unless told otherwise."""
    if "Cache" in str(error) and getattr(getattr(model, "config", None), "use_cache", False):
        return "; set model.config.use_cache = False: a cache is of no use in training"
    return ""


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    for number, line in enumerate(lines[:-1]):
        if line.startswith("File ") and "The following call raised this error" in lines[number - 1]:
            text += f" (in {line.removeprefix('File ')}: {lines[number + 1]})"
    return f"{type(error).__name__}: {text}"[:500]


def _variants(inputs: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Examples and which of their sizes to leave open, from as many as possible to none."""
    example = dict(inputs)
    batch = _batch_size(example)
    grown = example
    if batch == 1:  # torch.export takes a size of 1 as fixed; nothing but sizes matters, so two samples do as well
        grown = pytree.tree_map(lambda leaf: _doubled(leaf) if _size(leaf) == 1 else leaf, example)
        batch = 2
    tokens = _token_shapes(grown, batch)
    variants = [(grown, _shapes(grown, batch, tokens))] if tokens else []
    if batch is not None:
        variants.append((grown, _shapes(grown, batch, set())))
    return [*variants, (example, _shapes(example, None, set()))]


def _size(leaf: Any) -> int | None:
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else None


def _batch_size(example: Mapping[str, Any]) -> int | None:
    sizes = (_size(leaf) for leaf in pytree.tree_leaves(example))
    return next((size for size in sizes if size is not None), None)


def _doubled(leaf: torch.Tensor) -> torch.Tensor:
    return torch.cat([leaf.detach(), leaf.detach()]).requires_grad_(leaf.requires_grad)


def _token_shapes(example: Mapping[str, Any], batch: int | None) -> set[torch.Size]:
    """Shapes of the two-dimensional integer inputs: token ids, whose second dimension is the sequence."""
    return {
        leaf.shape
        for leaf in pytree.tree_leaves(example)
        if _size(leaf) == batch and isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and _is_integer(leaf)
    }


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype is not torch.bool and not tensor.is_floating_point() and not tensor.is_complex()


def _shapes(example: dict[str, Any], batch: int | None, tokens: set[torch.Size]) -> dict[str, Any]:
    def of(leaf: Any) -> dict[int, Any] | None:
        if batch is None or _size(leaf) != batch:
            return None
        return {0: Dim.AUTO, 1: Dim.AUTO} if leaf.shape in tokens else {0: Dim.AUTO}

    return {name: pytree.tree_map(of, value) for name, value in example.items()}


def _exported(model: nn.Module, example: dict[str, Any], shapes: dict[str, Any]) -> ExportedProgram:
    with (
        _exporting,
        _quiet(),
        _unchanged(model),
        _unchanged_generators(),
        _custom_functions_refused(),
        _aux_losses_recorded(),
        torch.enable_grad(),
    ):
        _spell_out(model, example)
        is_open = any(dims is not None for dims in pytree.tree_leaves(shapes))
        return torch.export.export(model, (), example, dynamic_shapes=shapes if is_open else None, strict=False)


def _spell_out(model: nn.Module, names: Iterable[str]) -> None:
    """Let the forward pass name what it takes through ``**kwargs``: torch.export mixes up the shapes otherwise.

    Only for use under `_unchanged`, which takes the replacement away again.
    """
    forward = model.forward
    if set(names) <= set(inspect.signature(forward).parameters):
        return

    def spelled_out(**kwargs: Any) -> Any:
        return forward(**kwargs)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    vars(spelled_out)["__signature__"] = inspect.Signature(named)
    vars(model)["forward"] = spelled_out


def _refuse_backward_hooks(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(f"torch.export: module '{path or '(model)'}' has backward hooks, which would be lost")


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back all attributes, also the contents of lists and dictionaries; refuse a loss hidden in an attribute."""
    attributes = {module: dict(vars(module)) for module in model.modules()}
    contents = [
        (value, value.copy())
        for values in attributes.values()
        for value in values.values()
        if type(value) in (list, dict, set, OrderedDict)
    ]
    try:
        yield
        for path, module in model.named_modules():
            _refuse_hidden_loss(path, vars(module), attributes.get(module, {}))
    finally:
        for module, values in attributes.items():
            vars(module).clear()
            vars(module).update(values)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


def _refuse_hidden_loss(path: str, now: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in now.items():
        if isinstance(value, torch.Tensor) and value is not before.get(name) and "loss" in name.lower():
            raise SliceError(
                f"module '{path or '(model)'}' stores a loss in its attribute '{name}' during forward; a loss kept "
                "there would not be trained on once the model is cut. Hand it over with "
                "torchslicer.add_aux_loss(value, weight) inside forward, or return it."
            )


@contextlib.contextmanager
def _unchanged_generators() -> Iterator[None]:
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):  # on other devices stand-ins draw no numbers
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _custom_functions_refused() -> Iterator[None]:
    """Refuse custom autograd functions: torch.export records their forward pass and drops their backward pass."""
    stock: Any = vars(torch.autograd.Function)["apply"]
    here = threading.get_ident()

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and not cls.__module__.startswith("torch."):
            raise TraceError(f"torch.export: would drop the backward pass of the autograd function {cls.__qualname__}")
        return stock.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = stock  # type: ignore[method-assign]


class _AuxLosses(list[tuple[torch.Tensor, float]]):
    """A collector that leaves a mark in the record for every auxiliary loss."""

    def append(self, loss: tuple[torch.Tensor, float]) -> None:
        torch.ops.torchslicer.aux_loss(*loss)


_operators = torch.library.Library("torchslicer", "FRAGMENT")
_operators.define("aux_loss(Tensor loss, float weight) -> Tensor")
_operators.impl("aux_loss", lambda loss, _: loss.clone(), "CompositeImplicitAutograd")


@contextlib.contextmanager
def _aux_losses_recorded() -> Iterator[None]:
    token = _collector.set(_AuxLosses())
    try:
        yield
    finally:
        _collector.reset(token)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch.export says about failures that are reported in an error anyway, in this thread only.

    The warning filters are the process's (before Python 3.14): while a model is exported, the few messages named
    here are silent in other threads too.
    """
    here, stderr = threading.get_ident(), sys.stderr

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno < logging.WARNING

    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    for logger in loggers:
        logger.addFilter(elsewhere)
    sys.stderr = _MutedStream(stderr, lambda: threading.get_ident() == here)
    try:
        with warnings.catch_warnings():
            for message in _HARMLESS:
                warnings.filterwarnings("ignore", message=message)  # noqa: TID251  (put back right after)
            yield
    finally:
        sys.stderr = stderr
        for logger in loggers:
            logger.removeFilter(elsewhere)


class _MutedStream(io.TextIOBase):
    """A text stream that drops what is written while *muted* says so."""

    def __init__(self, stream: TextIO, muted: Callable[[], bool]) -> None:
        self._stream = stream
        self._muted = muted

    def write(self, text: str) -> int:
        """Write *text*, or drop it."""
        return len(text) if self._muted() else self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream behind."""
        self._stream.flush()

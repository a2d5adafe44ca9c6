"""Let go of a model's weights while workers hold them, and take them back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchslicer.errors import ConfigError, RunError
from torchslicer.graph.fx import tensor_names
from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.interpreter import current_buffer

logger = logging.getLogger("torchslicer.distributed")

_T: Any = torch.Tensor
_PROPERTIES = ("shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim")
_HARMLESS = frozenset(
    {getattr(_T, name).__get__ for name in _PROPERTIES}
    | {_T.requires_grad.__set__, _T.grad.__set__, _T.requires_grad_, _T.size, _T.stride, _T.dim, _T.numel, _T.nelement}
    | {_T.element_size, _T.is_floating_point, _T.is_complex, _T.__hash__, _T.__len__}
)


class ReleasedParameter(nn.Parameter):
    """Stands where a parameter's values were: it has a shape, and an error for everybody who wants values."""

    original: nn.Parameter
    """What the parameter was, with its hooks, without its values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values.

        Raises:
            RunError: Values are needed.
        """
        if func not in _HARMLESS:
            raise released_error()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<parameter {tuple(self.shape)} {self.dtype}, released: the workers have its values>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def released_error() -> RunError:
    """Return the error about weights that are not here."""
    return RunError(
        "the weights of this model are not here: they were released once the workers had them "
        "(free_local_weights=True). They come back at the end of training; sliced.state_dict() fetches them while it "
        "lasts. If training failed they are lost: load some with sliced.load_state_dict(...), or make the model anew"
    )


def release(graph: ModelGraph) -> None:
    """Free the memory of all parameters that a unit of *graph* uses; they stay the same objects.

    Their buffers stay: they are small. A parameter that somebody else refers to in a way that makes it impossible is
    left as it is.
    """
    used = {name for unit in graph.units for name in unit.parameters}
    for name, parameter in graph.parameters.items():
        if name in used and not isinstance(parameter, ReleasedParameter):
            try:
                _release(parameter)
            except RuntimeError as error:
                logger.warning("the memory of '%s' cannot be released: %s", name, error)


def _release(parameter: nn.Parameter) -> None:
    shape = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    other: Any = ReleasedParameter(shape, requires_grad=parameter.requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        torch.utils.swap_tensors(parameter, other)
    other.data = torch.empty(0, dtype=other.dtype, device=other.device)
    parameter.original = other  # type: ignore[attr-defined]


def check_weights(graph: ModelGraph) -> None:
    """Check that the model has its weights.

    Raises:
        RunError: They were released, and have not come back.
    """
    if _released(graph):
        raise released_error()


def _released(graph: ModelGraph) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in graph.parameters.items() if isinstance(parameter, ReleasedParameter)}


def state_names(model: nn.Module, graph: ModelGraph) -> dict[str, str]:
    """Return what each entry of *model*'s state is called in *graph*; "" for what is not in it."""
    names = tensor_names(graph.model)
    return {key: names.get(id(tensor), "") for key, tensor in model.state_dict(keep_vars=True).items()}


def recover(model: nn.Module, graph: ModelGraph, state_dict: Mapping[str, Tensor]) -> None:
    """Give the parameters that a failed run has lost memory again, and the values of *state_dict*.

    Raises:
        ConfigError: Some are not in it, or have another shape.
    """
    lost = _released(graph)
    keys = {name: key for key, name in reversed(state_names(model, graph).items()) if name in lost}
    missing = [name for name in lost if keys.get(name) not in state_dict]
    if missing:
        raise ConfigError(f"load_state_dict: the model has lost its weights, and these are not given: {missing}")
    for name, parameter in lost.items():
        found = state_dict[keys[name]]
        if found.shape != parameter.shape:
            raise ConfigError(f"load_state_dict: '{name}': expected {tuple(parameter.shape)}, got {tuple(found.shape)}")
    fill(graph, {name: state_dict[keys[name]].clone() for name in lost})


def fill(graph: ModelGraph, state: Mapping[str, Tensor]) -> None:
    """Give parameters and buffers the values of *state*, released or not."""
    with torch.no_grad():
        for name, values in state.items():
            tensor = graph.parameters[name] if name in graph.parameters else current_buffer(graph, name)
            if isinstance(tensor, ReleasedParameter):
                _fill(tensor, values)
            else:
                tensor.data.copy_(values)


def _fill(parameter: ReleasedParameter, values: Tensor) -> None:
    original: Any = parameter.original
    stride, requires_grad = parameter.stride(), parameter.requires_grad
    if (values.device, values.dtype, values.stride()) == (original.device, original.dtype, stride):
        original.data = values  # it was received for this, and belongs to nobody else
    else:
        original.data = torch.empty_strided(values.shape, stride, dtype=original.dtype, device=original.device)
        original.data.copy_(values)
    with torch._C.DisableTorchFunctionSubclass():
        torch.utils.swap_tensors(parameter, original)
    parameter.requires_grad_(requires_grad)

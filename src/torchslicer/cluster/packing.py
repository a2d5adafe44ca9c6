"""Values and gradients as frames, and back.

A value that is one tensor is one frame. Anything else (tuples, dictionaries, None, numbers) is a frame of JSON that
says how it is put together, and one frame for each tensor in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchslicer.errors import ProtocolError, StageError
from torchslicer.pipeline.boundary import Gradients, Packet
from torchslicer.transport.frame import Frame, FrameFlags, FrameHeader, FrameKind

Key = tuple[FrameKind, int, int, int, int]
"""Kind, pass, stage, micro-batch, value."""

_LEAF = pytree.tree_structure(0)
_MAX_DEPTH = 32


@dataclass(frozen=True)
class Address:
    """Where a value belongs: the fields of a frame's header that say so."""

    generation: int
    pass_index: int
    stage: int
    microbatch: int
    value: int
    run: int = 0

    def fields(self) -> dict[str, Any]:
        """Return them as keyword arguments for a frame."""
        return {
            "generation": self.generation,
            "pass_index": self.pass_index,
            "stage": self.stage,
            "microbatch": self.microbatch,
            "value": self.value,
            "run": self.run,
        }


def key_of(header: FrameHeader) -> Key:
    """Return what a frame is filed under."""
    return (header.kind, header.pass_index, header.stage, header.microbatch, header.value)


def packet_frames(kind: FrameKind, packet: Packet, address: Address) -> Iterator[Frame]:
    """Yield the frames of a value.

    Raises:
        StageError: It holds something that cannot be sent to another process.
    """
    names = address.fields()
    if packet.spec == _LEAF and isinstance(packet.leaves[0], torch.Tensor):
        flags = FrameFlags.WANTS_GRADIENT if packet.wants_gradient[0] else FrameFlags.NONE
        yield Frame.of_tensor(kind, packet.leaves[0], flags=flags, **names)
        return
    tensors = [
        (leaf, want) for leaf, want in zip(packet.leaves, packet.wants_gradient, strict=True) if _is_tensor(leaf)
    ]
    text = json.dumps({"tree": _describe(packet)}, separators=(",", ":")).encode()
    num_leaves = 1 + len(tensors)
    yield Frame.of_bytes(kind, text, flags=FrameFlags.PLAIN, leaf=0, num_leaves=num_leaves, **names)
    for number, (leaf, want) in enumerate(tensors, 1):
        flags = FrameFlags.WANTS_GRADIENT if want else FrameFlags.NONE
        yield Frame.of_tensor(kind, leaf, flags=flags, leaf=number, num_leaves=num_leaves, **names)


def gradient_frames(gradients: Gradients, address: Address) -> Iterator[Frame]:
    """Yield the frames of the gradients of a value's leaves."""
    names = address.fields()
    for leaf, gradient in enumerate(gradients):
        if gradient is None:
            flags = FrameFlags.NO_GRADIENT
            yield Frame.of_bytes(FrameKind.BACKWARD, flags=flags, leaf=leaf, num_leaves=len(gradients), **names)
        else:
            yield Frame.of_tensor(FrameKind.BACKWARD, gradient, leaf=leaf, num_leaves=len(gradients), **names)


@dataclass
class Assembler:
    """Puts values together from frames that arrive one by one."""

    _parts: dict[Key, dict[int, Frame]] = field(default_factory=dict)

    def add(self, frame: Frame) -> tuple[Key, Packet | Gradients] | None:
        """Take a frame in; return the key and the value once it is complete.

        Raises:
            ProtocolError: The frames do not fit together.
        """
        header = frame.header
        key = key_of(header)
        if header.num_leaves <= 1:
            return key, _complete({header.leaf: frame})
        parts = self._parts.setdefault(key, {})
        if header.leaf in parts:
            raise ProtocolError(f"{header.describe()} came twice")
        parts[header.leaf] = frame
        if len(parts) < header.num_leaves:
            return None
        del self._parts[key]
        return key, _complete(parts)


def _complete(parts: dict[int, Frame]) -> Packet | Gradients:
    frames = [parts[leaf] for leaf in sorted(parts)]
    first = frames[0].header
    if first.kind is FrameKind.BACKWARD:
        return tuple(None if f.header.flags & FrameFlags.NO_GRADIENT else f.tensor() for f in frames)
    if not first.flags & FrameFlags.PLAIN:
        return Packet((frames[0].tensor(),), _LEAF, (bool(first.flags & FrameFlags.WANTS_GRADIENT),))
    tensors = [frame.tensor() for frame in frames[1:]]
    wants = {id(f.payload): bool(f.header.flags & FrameFlags.WANTS_GRADIENT) for f in frames[1:]}
    value = _rebuild(frames[0].message().get("tree"), tensors, 0)
    leaves, spec = pytree.tree_flatten(value)
    return Packet(tuple(leaves), spec, tuple(wants.get(id(leaf), False) for leaf in leaves))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _describe(packet: Packet) -> Any:
    """Return the structure as JSON; tensors are numbered in the order of the leaves."""
    numbers = iter(range(len(packet.leaves)))
    marked = [_Tensor(next(numbers)) if _is_tensor(leaf) else leaf for leaf in packet.leaves]
    return _to_json(pytree.tree_unflatten(marked, packet.spec))


@dataclass(frozen=True)
class _Tensor:
    number: int


def _to_json(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return {"tensor": value.number}
    if value is None or isinstance(value, (bool, int, str)):
        return {"plain": value}
    if isinstance(value, float):
        return {"float": value.hex()}
    if type(value) is list:
        return {"list": [_to_json(item) for item in value]}
    if type(value) is tuple or type(value) is torch.Size:
        return {"tuple": [_to_json(item) for item in value]}
    if type(value) is dict and all(isinstance(key, (str, int)) for key in value):
        return {"dict": [[key, _to_json(item)] for key, item in value.items()]}
    raise StageError(
        f"a value of type {type(value).__qualname__} cannot be sent to another process; return tensors, None, numbers, "
        "text, or tuples, lists and dictionaries of them"
    )


def _rebuild(tree: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if not isinstance(tree, dict) or len(tree) != 1 or depth > _MAX_DEPTH:
        raise ProtocolError("the structure of a value is malformed")
    [(kind, content)] = tree.items()
    if kind == "tensor":
        return _next_tensor(tensors)
    if kind == "plain" and (content is None or isinstance(content, (bool, int, str))):
        return content
    if kind == "float" and isinstance(content, str):
        return _float(content)
    if kind in ("list", "tuple") and isinstance(content, list):
        items = [_rebuild(item, tensors, depth + 1) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict" and isinstance(content, list):
        return {_key(pair): _rebuild(pair[1], tensors, depth + 1) for pair in content}
    raise ProtocolError(f"the structure of a value is malformed at {str(kind)[:40]!r}")


def _next_tensor(tensors: list[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        raise ProtocolError("the structure of a value names more tensors than came")
    return tensors.pop(0)


def _key(pair: Any) -> str | int:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], (str, int)):
        raise ProtocolError("the structure of a value is malformed at a key")
    return pair[0]


def _float(text: str) -> float:
    try:
        return float.fromhex(text)
    except ValueError:
        raise ProtocolError("the structure of a value holds no valid number") from None

"""Small graphs made by hand, for tests that need a `ModelGraph` and no tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchslicer.graph.model import GraphInput, ModelGraph, Node, Ref, Unit

BYTES = 4  # of one float32


class Net(nn.Module):
    """Stands for the model; nothing runs it."""


def chain_graph(
    sizes: Sequence[int],
    *,
    names: Sequence[str] | None = None,
    kinds: Mapping[int, str] | None = None,
    tied: Mapping[int, Sequence[int]] | None = None,
    skips: Sequence[tuple[int, int]] = (),
    outputs: Sequence[int] = (),
    buffers: Mapping[int, int] | None = None,
    forbidden: Mapping[int, str] | None = None,
) -> ModelGraph:
    """Return a chain of units, where unit i has one parameter of ``sizes[i]`` floats (none for 0).

    ``tied[i]`` are units whose parameter unit i uses too, ``skips`` are (producer, consumer) pairs of units,
    ``outputs`` are units whose values the model returns besides the last, ``buffers[i]`` is the floats of a buffer.
    Node 0 is the input, node i + 1 is the only node of unit i, and its value is called ``v<i>``.
    """
    names = list(names) if names is not None else [f"layer{i}" for i in range(len(sizes))]
    last = len(sizes)
    nodes = [Node(0, "x", "input", "x")]
    units = []
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        args = (Ref(i), *(Ref(producer + 1) for producer, consumer in skips if consumer == i))
        nodes.append(Node(i + 1, f"v{i}", "module", name, args))
        used = ([f"{name}.weight"] if size else []) + [f"{names[other]}.weight" for other in (tied or {}).get(i, ())]
        held = (f"{name}.stat",) if i in (buffers or {}) else ()
        units.append(Unit(i, name, (kinds or {}).get(i, "module"), (i + 1,), tuple(dict.fromkeys(used)), held))
    output: Any = (Ref(last), *(Ref(unit + 1) for unit in outputs)) if outputs else Ref(last)
    return ModelGraph(
        source="fx",
        model=Net(),
        modules={},
        parameters={
            f"{name}.weight": nn.Parameter(torch.zeros(size)) for name, size in zip(names, sizes, strict=True) if size
        },
        buffers={f"{names[i]}.stat": torch.zeros(size) for i, size in (buffers or {}).items()},
        constants={},
        nodes=tuple(nodes),
        units=tuple(units),
        inputs=(GraphInput("x", 0),),
        output=output,
        forbidden=dict(forbidden or {}),
    )

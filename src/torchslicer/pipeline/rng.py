"""Random numbers keyed by (seed, step, micro-batch, unit).

The generator is reseeded before each unit that may draw, so what a dropout layer draws does not depend on how the
model is cut, on the schedule, on the process it runs in, or on whether it is run again (recomputation, recovery).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torchslicer.graph.generators import EXCLUSIVE

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Return a well-mixed 64-bit number (the SplitMix64 finaliser; Steele, Lea and Flood, OOPSLA 2014, section 4).

    >>> mix(0) != mix(1)
    True
    """
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, step: int, microbatch: int) -> int:
    """Return the key of one micro-batch of one step; each unit derives its own from it."""
    return mix(mix(mix(seed & _MASK) ^ (step & _MASK)) ^ microbatch)


def seed_unit(key: int, unit: int, device: torch.device) -> None:
    """Reseed the generators that *unit* may draw from."""
    number = mix(key ^ unit)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)


@contextlib.contextmanager
def preserved_rng(devices: tuple[torch.device, ...] = ()) -> Iterator[None]:
    """Give the caller's global generators back as they were; other threads wait meanwhile."""
    with EXCLUSIVE:
        yield from _preserved(devices)


def _preserved(devices: tuple[torch.device, ...]) -> Iterator[None]:
    state = torch.default_generator.get_state()
    cuda = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        for device, cuda_state in cuda.items():
            torch.cuda.set_rng_state(cuda_state, device)

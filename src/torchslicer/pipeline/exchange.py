"""How stages hand values and gradients to each other.

A runtime asks its exchange for what a stage needs and gives it what a stage has made. Within a rank that is a
dictionary; between ranks, frames on channels (`torchslicer.cluster`).
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torchslicer.pipeline.boundary import Gradients, Packet
from torchslicer.pipeline.stage import Route

T = TypeVar("T")
Slot = tuple[int, int]
"""A stage and a micro-batch."""


class Exchange(Protocol):
    """Moves packets forward and gradients backward between stages."""

    def send_packet(self, route: Route, microbatch: int, packet: Packet) -> None:
        """Hand a value to every stage that uses it."""

    def take_packets(self, slot: Slot, routes: tuple[Route, ...]) -> dict[int, Packet]:
        """Return the values of *routes* for a stage and micro-batch, once all are there."""

    def send_gradients(self, stage: int, route: Route, microbatch: int, gradients: Gradients) -> None:
        """Hand the gradient of a value to *stage*."""

    def take_gradients(self, slot: Slot, routes: tuple[Route, ...]) -> dict[int, Gradients]:
        """Return the gradients of the values of *routes* for a stage and micro-batch, once all are there."""

    def clear(self) -> None:
        """Throw everything away."""


class LocalExchange:
    """The exchange of a rank that holds every stage."""

    def __init__(self) -> None:
        self._packets: dict[Slot, dict[int, Packet]] = {}
        self._gradients: dict[Slot, dict[int, Gradients]] = {}

    def send_packet(self, route: Route, microbatch: int, packet: Packet) -> None:
        """Hand a value to every stage that uses it."""
        for stage in route.consumers:
            self._packets.setdefault((stage, microbatch), {})[route.node] = packet

    def take_packets(self, slot: Slot, routes: tuple[Route, ...]) -> dict[int, Packet]:
        """Return the values of *routes*."""
        return _complete(self._packets.pop(slot, {}), slot, routes)

    def send_gradients(self, stage: int, route: Route, microbatch: int, gradients: Gradients) -> None:
        """Hand the gradient of a value to *stage*."""
        self._gradients.setdefault((stage, microbatch), {})[route.node] = gradients

    def take_gradients(self, slot: Slot, routes: tuple[Route, ...]) -> dict[int, Gradients]:
        """Return the gradients of the values of *routes*."""
        return _complete(self._gradients.pop(slot, {}), slot, routes)

    def clear(self) -> None:
        """Throw everything away."""
        self._packets.clear()
        self._gradients.clear()


def _complete(found: dict[int, T], slot: Slot, routes: tuple[Route, ...]) -> dict[int, T]:
    missing = [route.name for route in routes if route.node not in found]
    if missing:
        raise RuntimeError(f"stage {slot[0]}, micro-batch {slot[1]}: {missing} should have been sent before")
    return found

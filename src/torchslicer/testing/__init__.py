"""Test kit for TorchSlicer and for code that extends it: a suite that every channel must pass, and a faulty channel."""

from __future__ import annotations

from torchslicer.testing.conformance import ChannelConformance, tensors_of_every_kind
from torchslicer.testing.faulty import FaultyChannel

__all__ = ["ChannelConformance", "FaultyChannel", "tensors_of_every_kind"]

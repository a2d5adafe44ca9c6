"""Channels: frames of tensors between processes. ``docs/wire-format.md`` describes what travels.

``transport.grpc`` is not imported here: it needs the ``grpc`` extra.
"""

from __future__ import annotations

from torchslicer.transport.address import Endpoint, choose_endpoint, host_id, local_path
from torchslicer.transport.base import Channel, ChannelOptions, ChannelStats, Listener
from torchslicer.transport.frame import Frame, FrameFlags, FrameHeader, FrameKind, FrameLimits
from torchslicer.transport.memory import memory_pair
from torchslicer.transport.tcp import TcpListener, connect

__all__ = [
    "Channel",
    "ChannelOptions",
    "ChannelStats",
    "Endpoint",
    "Frame",
    "FrameFlags",
    "FrameHeader",
    "FrameKind",
    "FrameLimits",
    "Listener",
    "TcpListener",
    "choose_endpoint",
    "connect",
    "host_id",
    "local_path",
    "memory_pair",
]

"""What workers are told before a run: how many threads each uses, and which ports it may take."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from torchslicer.cluster.members import share_threads
from torchslicer.cluster.ports import port_pairs
from torchslicer.errors import ConfigError


@dataclass(frozen=True)
class FakeHello:
    """What counts of a worker here."""

    node: str
    host: str = "h"
    cores: int = 8
    threads: int = 0


def shared(*hellos: FakeHello) -> dict[str, int]:
    members: Any = [SimpleNamespace(hello=hello) for hello in hellos]
    return share_threads(members)


def test_the_workers_of_a_host_share_its_cores() -> None:
    assert shared(FakeHello("a")) == {"a": 8}
    assert shared(FakeHello("a"), FakeHello("b"), FakeHello("c")) == {"a": 2, "b": 2, "c": 2}
    assert shared(FakeHello("a"), FakeHello("b"), FakeHello("other", "i", 4)) == {"a": 4, "b": 4, "other": 4}


def test_who_was_told_how_many_threads_to_use_leaves_the_others_less() -> None:
    assert shared(FakeHello("a", threads=2), FakeHello("b"), FakeHello("c")) == {"a": 2, "b": 3, "c": 3}
    assert shared(FakeHello("a", threads=12), FakeHello("b")) == {"a": 12, "b": 1}
    assert shared(*(FakeHello(name, cores=2) for name in "abc")) == {"a": 1, "b": 1, "c": 1}


def test_pairs_of_data_ports() -> None:
    assert port_pairs("50061", offset=10) == ((50061, 50071),)
    assert port_pairs("1-5") == ((1, 2), (3, 4))
    for setting in ("x", "", "5-5", "6-5", "0-4", "-4", 65535, "65536", "1:2"):
        with pytest.raises(ConfigError, match="data port: expected"):
            port_pairs(setting)

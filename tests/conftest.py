"""Set-up of all tests: PyTorch seeded, leaks reported, Hypothesis without deadlines."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import settings

from tests.support import tvshim
from tests.support.leak_police import leak_police

__all__ = ["leak_police", "seed_torch"]

# Who starts the tests in the background lets them, and every process that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test module imports torchvision.
tvshim.declare()

# Machines are shared: the time of one example says nothing. pytest-timeout stops a test that hangs. In CI the examples
# are the same each time, so that a change is not blamed for what a new random example finds.
settings.register_profile("torchslicer", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("torchslicer")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Tests that compare bits over the whole matrix can be told to run each of its cases more than once."""
    parser.addoption("--repeats", type=int, default=1, help="how often each run of the full matrices is compared")


@pytest.fixture(autouse=True)
def seed_torch(leak_police: None) -> None:
    """Give every test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)

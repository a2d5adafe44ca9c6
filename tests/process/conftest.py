"""Fixtures of the tests with real processes."""

from __future__ import annotations

from tests.support.cluster import one_thread, peers, pool
from tests.support.crew import crew, hired

__all__ = ["crew", "hired", "one_thread", "peers", "pool"]

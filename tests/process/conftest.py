"""Fixtures of the tests with real processes."""

from __future__ import annotations

from tests.support.cluster import one_thread, peers, pool

__all__ = ["one_thread", "peers", "pool"]

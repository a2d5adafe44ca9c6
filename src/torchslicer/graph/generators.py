"""The global random generators belong to the whole process; whoever seeds or watches them must be alone."""

from __future__ import annotations

import threading

EXCLUSIVE = threading.RLock()
"""Held while a trace watches the generators and while stages run on reseeded ones.

Two runs in threads of one process take turns, batch by batch; else one would draw the other's random numbers.
"""

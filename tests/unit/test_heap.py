"""Freed memory is kept for the next step, and given back afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchslicer.cluster import heap

# As in a worker: a thread that receives makes the tensors, the one that computes lets go of them.
FAULTS = """
import queue, resource, threading, torch
from torchslicer.cluster.heap import keep_freed_memory, return_freed_memory

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

def faults(steps=40, tensors=8):
    made, done = queue.SimpleQueue(), queue.SimpleQueue()
    def receive():
        for _ in range(steps):
            for _ in range(tensors):
                made.put(torch.ones(1 << 20))
            done.get()
    thread = threading.Thread(target=receive)
    thread.start()
    for step in range(steps):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [made.get() for _ in range(tensors)]
        while held:
            held.pop()
        done.put(None)
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
keep_freed_memory()
kept = faults()
held = [torch.ones(1 << 18) for _ in range(64)]
del held
before = resident_mb()
return_freed_memory()
print(usual, kept, before - resident_mb())
"""


@pytest.mark.skipif(heap._glibc() is None, reason="not glibc")
def test_freed_memory_is_used_again_without_page_faults_and_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=60, check=True)
    usual, kept, returned_mb = (float(word) for word in done.stdout.split())
    assert kept < usual / 2
    assert returned_mb > 16

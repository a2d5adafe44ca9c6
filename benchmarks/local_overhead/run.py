"""What slicing costs on one machine, next to a loop written by hand: time, memory, and microseconds an action.

    python benchmarks/local_overhead/run.py [--quick] [--threads 2] [--only throughput memory actions]

README.md beside this file says how each number is taken.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from models import CASES, Case, noop
from torch import nn

import torchslicer as ts

NUM_STAGES = 4
MEMORY_STEPS = 3
MODES: dict[str, dict[str, Any]] = {
    "loop": {},
    "plain": {},
    "gpipe, m = 4, recompute always": {"schedule": "gpipe", "num_microbatches": 4, "recompute": "always"},
}
Batch = tuple[torch.Tensor, torch.Tensor]


# -- the two things that are compared ----------------------------------------------------------------------------------


class Loop:
    """The loop that people write by hand; with micro-batches it accumulates gradients."""

    def __init__(
        self, model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer, pieces: int = 1
    ) -> None:
        self.model, self.criterion, self.optimizer, self.pieces = model, criterion, optimizer, pieces

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        if self.pieces == 1:
            loss = self.criterion(self.model(batch[0]), batch[1])
            loss.backward()
            total = loss.item()
        else:
            total = sum(self._piece(x, y) for x, y in zip(*(t.chunk(self.pieces) for t in batch), strict=True))
        self.optimizer.step()
        return total

    def _piece(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = self.criterion(self.model(x), y) / self.pieces
        loss.backward()
        return loss.item()


def make_loop(case: Case, model: nn.Module) -> Loop:
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), **case.options)
    return Loop(model, nn.CrossEntropyLoss(), optimizer)


def train_sliced(model: nn.Module, loader: Any, optimizer: Any, criterion: str, **options: Any) -> None:
    """Cut *model* into 4 stages and train it as users do, run log included."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BatchNorm under micro-batches
        ts.slice(model, n=NUM_STAGES).train(loader, optimizer, criterion, epochs=1, run_dir=folder, **options)


# -- time --------------------------------------------------------------------------------------------------------------


class Interleaved:
    """A loader that times each step of whoever takes its batches, and after it a step of the loop."""

    def __init__(self, batch: Batch, other: Callable[[Batch], object], steps: int) -> None:
        self.batch, self.other, self.steps = batch, other, steps
        self.times: list[tuple[float, float]] = []

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.steps):
            started = time.perf_counter()
            yield self.batch
            between = time.perf_counter()
            self.other(self.batch)
            self.times.append((between - started, time.perf_counter() - between))

    def rounds(self, warmup: int, steps_per_round: int) -> list[tuple[float, float]]:
        """Seconds of (sliced, loop) summed over the steps of each round."""
        kept = self.times[warmup:]
        groups = [kept[i : i + steps_per_round] for i in range(0, len(kept), steps_per_round)]
        return [(sum(a for a, _ in group), sum(b for _, b in group)) for group in groups]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def measure_throughput(case: Case, rounds: int, steps_per_round: int) -> list[str]:
    torch.manual_seed(0)
    model, batch, warmup = case.build(), case.batch(), 2
    loop = make_loop(case, copy.deepcopy(model))
    loader = Interleaved(batch, loop.step, warmup + rounds * steps_per_round)
    train_sliced(model, loader, {"name": case.optimizer, "params": case.options}, "cross_entropy")
    pairs = loader.rounds(warmup, steps_per_round)
    per_s = [len(batch[0]) * steps_per_round / seconds for seconds, _ in pairs]
    by_loop = [len(batch[0]) * steps_per_round / seconds for _, seconds in pairs]
    ratios = [theirs / ours for ours, theirs in pairs]
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), loop.model.parameters(), strict=True))
    verdict = judge(statistics.median(ratios) >= 0.97)
    return [case.label, spread(by_loop, 1), spread(per_s, 1), spread(ratios), verdict, "yes" if same else "NO"]


def measure_actions(schedule: str, rounds: int, steps_per_round: int, pieces: int = 64) -> list[str]:
    torch.manual_seed(0)
    model, batch, warmup = noop(), (torch.randn(pieces, 1), torch.randn(pieces, 1)), 3
    other = copy.deepcopy(model)
    loop = Loop(other, nn.MSELoss(), torch.optim.SGD(other.parameters(), lr=0.01), pieces)
    loader = Interleaved(batch, loop.step, warmup + rounds * steps_per_round)
    optimizer = {"name": "SGD", "params": {"lr": 0.01}}
    train_sliced(model, loader, optimizer, "MSELoss", schedule=schedule, num_microbatches=pieces)
    unit = 1e6 / (pieces * NUM_STAGES * steps_per_round)
    pairs = [(ours * unit, theirs * unit) for ours, theirs in loader.rounds(warmup, steps_per_round)]
    extra = [ours - theirs for ours, theirs in pairs]
    columns = [[ours for ours, _ in pairs], [theirs for _, theirs in pairs], extra, [value / 2 for value in extra]]
    return [schedule, *(spread(column, 1) for column in columns), judge(statistics.median(extra) <= 60)]


# -- memory ------------------------------------------------------------------------------------------------------------


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: memory is measured on Linux only")


def train_for_memory(case: Case, mode: str, model: nn.Module, batch: Batch) -> None:
    if mode == "loop":
        loop = make_loop(case, model)
        for _ in range(MEMORY_STEPS):
            loop.step(batch)
    else:
        optimizer = {"name": case.optimizer, "params": case.options}
        train_sliced(model, [batch] * MEMORY_STEPS, optimizer, "cross_entropy", **MODES[mode])


def peak_tensor_bytes(work: Callable[[], None]) -> int:
    """Most bytes of tensors alive at one time that *work* had allocated, from the profiler's allocation events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def memory_child(name: str, mode: str, how: str) -> None:
    """Run in a fresh process: print the peak that training adds, in bytes, as *how* sees it."""
    case = CASES[name]
    torch.manual_seed(0)
    batch = case.batch()
    before = status_bytes("VmRSS")
    model = case.build()
    if how == "resident":
        train_for_memory(case, mode, model, batch)
        peak = status_bytes("VmHWM") - before
    else:
        peak = tensor_bytes(model) + peak_tensor_bytes(lambda: train_for_memory(case, mode, model, batch))
    print(json.dumps({"peak": peak, "weights": tensor_bytes(model)}))


def tensor_bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ask_child(name: str, mode: str, how: str, threads: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--threads", str(threads), "--child", name, mode, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure_memory(name: str, repeats: int, threads: int) -> list[list[str]]:
    case = CASES[name]
    resident = {mode: [ask_child(name, mode, "resident", threads)["peak"] for _ in range(repeats)] for mode in MODES}
    exact = {mode: ask_child(name, mode, "tensors", threads) for mode in MODES}
    weights = exact["loop"]["weights"]
    # Weights, and what the optimizer keeps of them: one more copy for momentum, two for AdamW. Gradients count as
    # activations for the sliced model but not for plain: so the ratio that is judged is an upper bound.
    fixed = weights * {"SGD": 2, "AdamW": 3}[case.optimizer]
    plain_activations = exact["plain"]["peak"] - fixed - weights
    rows = []
    for mode in MODES:
        peak = exact[mode]["peak"]
        activations = peak - fixed - (0 if mode.startswith("gpipe") else weights)
        by_resident = statistics.median(resident[mode]) / statistics.median(resident["loop"])
        by_tensors, share = peak / exact["loop"]["peak"], activations / plain_activations
        good = {"loop": True, "plain": max(by_tensors, by_resident) <= 1.03}.get(mode, share <= 0.5)
        rows.append(
            [case.label, mode, spread([value / 2**20 for value in resident[mode]], 0), f"{by_resident:.3f}",
             f"{peak / 2**20:.1f}", f"{by_tensors:.3f}", f"{activations / 2**20:.1f}", f"{share:.3f}",
             "" if mode == "loop" else judge(good)]
        )  # fmt: skip
    return rows


# -- report ------------------------------------------------------------------------------------------------------------


def judge(good: bool) -> str:
    return "met" if good else "MISSED"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def environment(threads: int) -> str:
    cpu = platform.processor() or "unknown CPU"
    if Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = f"{len(models)} x {models[0].partition(':')[2].strip()}" if models else cpu
    today = dt.datetime.now(tz=dt.timezone.utc).date()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, torchslicer {ts.__version__}"
    return f"{today}; {versions}; {platform.system()} {platform.release()}; {cpu}; {threads} thread(s)\n"


def report(what: Sequence[str], *, quick: bool, threads: int) -> None:
    rounds = 5 if quick else 9
    print(environment(threads))
    if "throughput" in what:
        rows = [measure_throughput(case, rounds, 1 if quick else 3) for case in CASES.values()]
        head = ["Plain, n = 4", "loop, samples/s", "sliced, samples/s", "ratio (>= 0.97)", "target", "same bits"]
        print(table(head, rows), flush=True)
    if "memory" in what:
        rows = [row for name in CASES for row in measure_memory(name, 1 if quick else 3, threads)]
        head = ["Memory", "mode", "resident, MiB", "to loop", "tensors, MiB", "to loop (<= 1.03)", "activations, MiB",
                "to plain (<= 0.5)", "target"]  # fmt: skip
        print(table(head, rows), flush=True)
    if "actions" in what:
        rows = [measure_actions(schedule, rounds, 3 if quick else 10) for schedule in ("gpipe", "1f1b")]
        head = ["No-op model, n = 4, m = 64", "sliced, us", "loop, us", "overhead a micro-batch and stage, us (<= 60)",
                "an action, us", "target"]  # fmt: skip
        print(table(head, rows), flush=True)


def main() -> None:
    sections = ("throughput", "memory", "actions")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="parts to run")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        memory_child(*arguments.child)
    else:
        report(arguments.only, quick=arguments.quick, threads=arguments.threads)


if __name__ == "__main__":
    main()

"""Slice every torchvision classification, segmentation and video model and write docs/coverage.md.

    python scripts/zoo.py                     the whole zoo; what is already in the cache is not run again
    python scripts/zoo.py --only resnet18     one model (may be repeated)
    python scripts/zoo.py --family swin       one family; --group video: one group
    python scripts/zoo.py --jobs 2            two models at a time

Each model runs in a process of its own, on one thread, and its result is kept in .cache/zoo. A result counts as long as
the sources of torchslicer and the versions of PyTorch and torchvision are the same; --keep counts it all the same, and
--fresh not at all. Failures are always run again. Only a run of the whole zoo writes the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import tvshim  # noqa: E402 - found only once the root is on the path

tvshim.declare()

import torch  # noqa: E402 - after the declaration, as torchvision
import torchvision  # noqa: E402

import torchslicer  # noqa: E402
from tests.support.zoo import GROUPS, STAGES, Outcome, ZooModel, examine, zoo  # noqa: E402

CACHE = ROOT / ".cache" / "zoo"
TABLE = ROOT / "docs" / "coverage.md"


def source_key() -> str:
    """Return a name for the state of everything that a result depends on."""
    digest = hashlib.sha256(f"{torch.__version__} {torchvision.__version__}".encode())
    for file in [*sorted((ROOT / "src" / "torchslicer").rglob("*.py")), ROOT / "tests" / "support" / "zoo.py"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


# -- results -------------------------------------------------------------------------------------------------------


class Cache:
    """Results by model, a file each."""

    def __init__(self, folder: Path, key: str, *, keep: bool = False, fresh: bool = False) -> None:
        self.folder = folder
        self.key = key
        self.keep = keep
        self.fresh = fresh
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")

    def load(self, name: str) -> Outcome | None:
        """Return the result of a model if there is one that counts."""
        data = self._read(name)
        if data is None or not (self.keep or data["key"] == self.key):
            return None
        return Outcome(**data["outcome"])

    def done(self, name: str) -> bool:
        """Whether a model need not be run."""
        outcome = None if self.fresh else self.load(name)
        return outcome is not None and outcome.passed

    def is_current(self, name: str) -> bool:
        """Whether the result of a model comes from the present sources."""
        data = self._read(name)
        return data is not None and data["key"] == self.key

    def store(self, outcome: Outcome) -> None:
        """Keep a result; a reader sees the old one or the new one, never half of it."""
        data = {"key": self.key, "outcome": dataclasses.asdict(outcome)}
        partial = self.folder / f"{outcome.name}.{os.getpid()}"
        partial.write_text(json.dumps(data, indent=1), encoding="utf-8")
        partial.replace(self.folder / f"{outcome.name}.json")

    def log(self, name: str) -> Path:
        """Where a model's process writes its messages."""
        return self.folder / f"{name}.log"

    def _read(self, name: str) -> Any:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


# -- running -------------------------------------------------------------------------------------------------------


def work(entry: ZooModel, cache: Cache) -> None:
    """Examine one model (in a process of its own) and store the result; an exception ends up in the log."""
    log = os.open(cache.log(entry.name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    outcome = examine(entry)
    outcome.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    cache.store(outcome)


def run(entries: Sequence[ZooModel], cache: Cache, *, jobs: int, limit: float) -> Iterator[Outcome]:
    """Run the models, *jobs* at a time, and yield each result as it comes."""
    # A forked process need not import torch again. It is safe here, since this one computes nothing.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    waiting = list(reversed(entries))
    running: dict[BaseProcess, tuple[ZooModel, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                entry = waiting.pop()
                process = context.Process(target=work, args=(entry, cache), name=entry.name)
                process.start()
                running[process] = (entry, time.monotonic())
            wait([process.sentinel for process in running], timeout=1.0)
            for process, (entry, started) in list(running.items()):
                if process.is_alive() and time.monotonic() - started > limit:
                    process.kill()
                    process.join()
                if not process.is_alive():
                    del running[process]
                    yield _conclude(entry, process, cache)
    finally:
        for process in running:
            process.kill()
            process.join()


def _conclude(entry: ZooModel, process: BaseProcess, cache: Cache) -> Outcome:
    """Return what a process has stored, or why it has stored nothing."""
    process.join()
    stored = cache.load(entry.name)
    if process.exitcode == 0 and stored is not None:
        return stored
    lines = cache.log(entry.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reason = lines[-1] if process.exitcode == 1 and lines else f"the process ended with code {process.exitcode}"
    outcome = Outcome(entry.name, entry.group, entry.family, results={str(n): reason for n in STAGES})
    cache.store(outcome)
    return outcome


# -- table ---------------------------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Coverage: the models of torchvision

`make zoo` slices every classification, segmentation and video model of torchvision into 2 and into 4 stages, without a
pack function, and takes one training step with each. It compares the loss, **every** gradient and every buffer after
the step with those of the plain backward pass of the unsplit model:

- **exact**: all bits are the same; **close**: within {tolerance} of the largest value of each tensor.
- A model with random layers (dropout, stochastic depth; marked †) draws other random numbers than the plain model once
  it is sliced, so it must pass two comparisons: as it is, bit for bit, with itself in one stage; and with the
  probabilities of its random layers set to 0, with the plain model.
- Inputs are small (64 × 64 pixels and 4 frames, or what a model needs; ViT made for 2 × 2 patches, MViT for 8 frames of
  64 × 64), the batch is 2, weights are random; layers are the real ones. Auxiliary outputs count in the loss.
- The library's own verification is on at the first cut of each model.
- Seconds are processor time on one core, for all of this together.

Left out: detection models (in training they take lists of boxes and return their own losses), optical flow (two images,
a loss over iterations) and quantized models (no gradients).

Made with {versions}, source state {key}.
"""


def table(entries: Sequence[ZooModel], cache: Cache) -> str:
    """Return docs/coverage.md."""
    outcomes = {entry.name: outcome for entry in entries if (outcome := cache.load(entry.name)) is not None}
    versions = (
        f"torchslicer {torchslicer.__version__}, torch {torch.__version__}, torchvision {torchvision.__version__}"
    )
    lines = [_INTRODUCTION.format(versions=versions, key=cache.key, tolerance="1e-5"), *_totals(entries, outcomes)]
    old = [name for name in outcomes if not cache.is_current(name)]
    if old:
        lines += ["", f"{len(old)} results come from an earlier state of the sources."]
    for group in GROUPS:
        lines += ["", f"## {group.capitalize()}", "", *_rows([o for o in outcomes.values() if o.group == group])]
    failed = [outcome for outcome in outcomes.values() if not outcome.passed]
    if failed:
        lines += ["", "## Failures", ""]
        lines += [f"- `{o.name}`, n = {n}: {o.results[n]}" for o in failed for n in o.results if not _good(o, n)]
    return "\n".join(lines) + "\n"


def _totals(entries: Sequence[ZooModel], outcomes: dict[str, Outcome]) -> list[str]:
    lines = ["| Group | Models | Run | Pass | Exact | Seconds |", "|---|---:|---:|---:|---:|---:|"]
    for group in (*GROUPS, "all"):
        names = [entry.name for entry in entries if group in (entry.group, "all")]
        found = [outcomes[name] for name in names if name in outcomes]
        exact = sum(all(outcome.results[str(n)] == "exact" for n in STAGES) for outcome in found)
        passed = sum(outcome.passed for outcome in found)
        seconds = sum(outcome.seconds for outcome in found)
        lines.append(f"| {group} | {len(names)} | {len(found)} | {passed} | {exact} | {seconds:.0f} |")
    return lines


def _rows(outcomes: Iterable[Outcome]) -> list[str]:
    lines = [
        "| Model | Family | Parameters (M) | Units | n = 2 | n = 4 | Largest difference | Seconds | Memory (GiB) |",
        "|---|---|---:|---:|---|---|---:|---:|---:|",
    ]
    for outcome in outcomes:
        verdicts = " | ".join(outcome.results[str(n)] if _good(outcome, str(n)) else "**fails**" for n in STAGES)
        worst = max(outcome.differences.values(), default=float("nan"))
        mark = " †" if outcome.random else ""
        lines.append(
            f"| {outcome.name}{mark} | {outcome.family} | {outcome.parameters / 1e6:.1f} | {outcome.units} | "
            f"{verdicts} | {worst:.2g} | {outcome.seconds:.1f} | {outcome.memory:.1f} |"
        )
    return lines


def _good(outcome: Outcome, stages: str) -> bool:
    return outcome.results.get(stages) in ("exact", "close")


# -- command -------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="run this model; may be repeated")
    parser.add_argument("--family", help="run the models of this family")
    parser.add_argument("--group", choices=GROUPS, help="run the models of this group")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default 1)")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds that a model may take (default 1200)")
    parser.add_argument("--fresh", action="store_true", help="run again what is in the cache")
    parser.add_argument("--keep", action="store_true", help="count results of earlier sources")
    parser.add_argument("--table", action="store_true", help="only write the table from what is in the cache")
    return parser.parse_args(argv)


def chosen(entries: Sequence[ZooModel], options: argparse.Namespace) -> list[ZooModel]:
    """Return the models that the command line asks for."""
    found = [
        entry
        for entry in entries
        if (not options.only or entry.name in options.only)
        and options.family in (None, entry.family)
        and options.group in (None, entry.group)
    ]
    unknown = set(options.only or ()) - {entry.name for entry in entries}
    if unknown or not found:
        families = sorted({entry.family for entry in entries})
        raise SystemExit(f"zoo: no model {', '.join(sorted(unknown))}; families: {', '.join(families)}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if a model fails."""
    options = arguments(argv)
    entries = zoo()
    cache = Cache(CACHE, source_key(), keep=options.keep, fresh=options.fresh)
    wanted = chosen(entries, options)
    missing = [] if options.table else [entry for entry in wanted if not cache.done(entry.name)]
    print(f"{len(wanted)} models, {len(wanted) - len(missing)} of them in the cache", flush=True)
    for number, outcome in enumerate(run(missing, cache, jobs=options.jobs, limit=options.limit), start=1):
        verdict = ", ".join(f"n = {n}: {result}" for n, result in outcome.results.items())
        print(f"[{number}/{len(missing)}] {outcome.name}: {verdict} ({outcome.seconds:.1f} s)", flush=True)
    results = [cache.load(entry.name) for entry in wanted]
    passed = sum(result is not None and result.passed for result in results)
    print(f"{passed} of {len(wanted)} pass")
    if len(wanted) == len(entries):
        TABLE.write_text(table(entries, cache), encoding="utf-8")
        print(f"wrote {TABLE.relative_to(ROOT)}")
    return 0 if passed == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())

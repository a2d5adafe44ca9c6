"""Two workers with one thread each against the unsplit loop and the peers, all interleaved in one run.

    python benchmarks/distributed/run.py --rounds 3 gpt resnet mlp ewise
    python benchmarks/distributed/run.py --peer PEER/bin/python --peer-scripts DIR ...

The peers need an environment of their own (see README.md). Every run is a fresh process with a warm-up epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLAIN = ("plain_t1", "plain_t2")
OURS = (
    *(
        "ours_plain",
        "ours_gpipe2",
        "ours_gpipe4",
        "ours_1f1b2",
        "ours_1f1b4",
        "ours_1f1b8",
        "ours_eager4",
        "ours_eager8",
    ),
    *("ours_tcp_gpipe4", "ours_tcp_1f1b4", "ours_grpc_gpipe4", "ours_grpc_1f1b4"),
    *("ours_tcp_eager4", "ours_grpc_eager4"),
)
P2P = ("ours_p2p_1f1b4", "ours_p2p_1f1b8", "ours_p2p_eager4", "ours_p2p_tcp_1f1b4", "ours_p2p_grpc_1f1b4")
PEERS = ("ts_grpc_gpipe4", "ts_tcp_gpipe4", "pp_gpipe4", "pp_1f1b4", "pp_1f1b8")
PEER_CODE = """
import json, os, sys
os.chdir(sys.argv[1]); sys.path.insert(0, sys.argv[1])
import bench_speed as b
fn, *a = b.CONF[sys.argv[3]]
x = b.wait(*b.fork(fn, sys.argv[2], *a, log=os.devnull), 300)
print("RESULT " + json.dumps(x))
"""


def plain(name: str, threads: int) -> dict:
    import torch
    from torch import nn
    from workloads import OPTIMIZER, Loader, build_model

    torch.set_num_threads(threads)
    model = build_model(name).train()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER["params"])
    criterion, loader = nn.CrossEntropyLoss(), Loader(name)
    for _ in range(2):
        started, samples, total = time.perf_counter(), 0, 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            samples += len(x)
            total += loss.item()
        rate = samples / (time.perf_counter() - started)
    return {"rate": rate, "loss": total / len(loader), "rss_mb": {"main": peak_mb("self")}}


def ours(name: str, kind: str) -> dict:
    import torch
    from workloads import OPTIMIZER, Loader, build_model

    import torchslicer as ts

    torch.set_num_threads(1)
    transport, schedule, count = CONFIGURATIONS[kind.replace("p2p_", "")]
    model, loader = build_model(name), Loader(name)
    # Times are taken on a batch of the size that stages will get: how units compare depends on it.
    example = tuple(tensor[: len(tensor) // count] for tensor in loader.batches[0])
    started = time.perf_counter()
    arguments = {"transport": "tcp"} if transport == "unix" else {"transport": transport, "same_host": False}
    with (driver_and_peer if kind in P2P else coordinator_and_workers)(arguments) as (executor, pids):
        sliced = ts.slice(model, strategy="time", n=2, executor=executor, example=example, criterion="cross_entropy")
        up, first = time.perf_counter(), {}
        history = sliced.train(
            loader,
            OPTIMIZER,
            "cross_entropy",
            epochs=2,
            schedule=schedule,
            num_microbatches=count,
            callbacks=[first_step(ts, first)],
            run_dir=False,
        )
        rss = {f"w{i}": peak_mb(pid) for i, pid in enumerate(pids)} | {"main": peak_mb("self")}
    return {
        "rate": history[1]["samples_per_s"],
        "loss": history[1]["loss"],
        "rss_mb": rss,
        "first_step_s": first["at"] - up,
        "stages": [len(stage.units) for stage in sliced.plan.stages],
        "total_s": time.perf_counter() - started,
    }


@contextlib.contextmanager
def coordinator_and_workers(arguments: dict) -> Iterator:
    """This process coordinates two workers."""
    from torchslicer.discovery import CoordinatorDiscovery
    from torchslicer.executors.distributed import DistributedExecutor
    from torchslicer.executors.processes import LocalWorkers

    with (
        DistributedExecutor(CoordinatorDiscovery(), "127.0.0.1:0", **arguments) as executor,
        LocalWorkers(executor.address, ["w0", "w1"], threads=1, trust=["workloads"]) as workers,
    ):
        executor.coordinator.wait_for(2, timeout_s=120)
        yield executor, workers.pids
        executor.close(shut_workers=True)


@contextlib.contextmanager
def driver_and_peer(arguments: dict) -> Iterator:
    """This process holds the first stage, a peer the second."""
    from torchslicer.discovery import StaticDiscovery
    from torchslicer.executors.distributed import DistributedExecutor

    command = [sys.executable, "-m", "torchslicer.cli", "worker", "--listen", "127.0.0.1:0", "--threads", "1"]
    options = ["--trust", "workloads", "--exit-with-stdin"]
    with subprocess.Popen(
        [*command, *options], stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as peer:
        address = next(line.rsplit(" ", 1)[-1].strip() for line in peer.stderr if "listening for a driver on" in line)
        threading.Thread(target=peer.stderr.read, daemon=True).start()
        with DistributedExecutor(
            StaticDiscovery(peers=[address]), host_stage=0, host_threads=1, **arguments
        ) as executor:
            yield executor, [peer.pid]
        peer.stdin.close()


def first_step(ts, first: dict):
    class FirstStep(ts.TrainingCallback):
        def on_step_end(self, step, metrics):
            first.setdefault("at", time.perf_counter())

    return FirstStep()


CONFIGURATIONS = {
    "ours_plain": ("unix", "gpipe", 1),
    "ours_gpipe2": ("unix", "gpipe", 2),
    "ours_gpipe4": ("unix", "gpipe", 4),
    "ours_1f1b2": ("unix", "1f1b", 2),
    "ours_1f1b4": ("unix", "1f1b", 4),
    "ours_1f1b8": ("unix", "1f1b", 8),
    "ours_eager4": ("unix", "eager-1f1b", 4),
    "ours_eager8": ("unix", "eager-1f1b", 8),
    "ours_tcp_eager4": ("tcp", "eager-1f1b", 4),
    "ours_grpc_eager4": ("grpc", "eager-1f1b", 4),
    "ours_tcp_gpipe4": ("tcp", "gpipe", 4),
    "ours_tcp_1f1b4": ("tcp", "1f1b", 4),
    "ours_grpc_gpipe4": ("grpc", "gpipe", 4),
    "ours_grpc_1f1b4": ("grpc", "1f1b", 4),
}


def peak_mb(pid: object) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith("VmHWM"))


def one(name: str, kind: str, options: argparse.Namespace) -> dict:
    if kind in PEERS:
        command = [options.peer, "-c", PEER_CODE, options.peer_scripts, name, kind]
    else:
        command = [sys.executable, __file__, "--child", kind, name]
    # Not for the peers: the public package has our module's name.
    path = "" if kind in PEERS else os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "2" if kind == "plain_t2" else "1",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": done.stderr[-2000:]}
    result = json.loads(lines[-1].removeprefix("RESULT "))
    if isinstance(result.get("rate"), list):
        result["rate"] = result["rate"][-1] if result["rate"] else None
    return result


def table(results: dict, name: str) -> str:
    base = statistics.median(r["rate"] for r in results[name]["plain_t1"] if r.get("rate"))
    rows = [
        f"### {name}",
        "",
        "| configuration | samples/s median (min-max) | / plain 1t | peak RSS MB |",
        "|---|---|---|---|",
    ]
    for kind, runs in results[name].items():
        rates = [run["rate"] for run in runs if run.get("rate")]
        if not rates:
            rows.append(f"| {kind} | failed: {runs[-1].get('error', '')[-200:]!r} | - | - |")
            continue
        middle = statistics.median(rates)
        rss = runs[-1].get("rss_mb") or runs[-1].get("rss")
        rows.append(f"| {kind} | {middle:.4g} ({min(rates):.4g}-{max(rates):.4g}) | {middle / base:.2f} | {rss} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of ewise")
    parser.add_argument("--only", default="", help="comma-separated configurations")
    parser.add_argument("--peer", help="Python of an environment with the peers")
    parser.add_argument("--peer-scripts", help="folder with the peers' scripts")
    parser.add_argument("--out", default="")
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        [name] = options.names
        run = plain(name, int(options.child[-1])) if options.child in PLAIN else ours(name, options.child)
        print("RESULT " + json.dumps(run))
        return
    names = options.names or (["ewise"] if options.quick else ["gpt", "resnet", "mlp", "ewise"])
    kinds = [*PLAIN, *OURS, *P2P, *(PEERS if options.peer else ())]
    kinds = [kind for kind in kinds if not options.only or kind in (*PLAIN[:1], *options.only.split(","))]
    results: dict = {name: {kind: [] for kind in kinds} for name in names}
    for number in range(1 if options.quick else options.rounds):
        for name in names:
            for kind in kinds:
                result = one(name, kind, options)
                results[name][kind].append(result)
                print(f"{number} {name:7} {kind:16}", {k: v for k, v in result.items() if k != "profile"}, flush=True)
                if options.out:
                    Path(options.out).write_text(json.dumps(results, indent=1))
    print("\n\n".join(table(results, name) for name in names))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()

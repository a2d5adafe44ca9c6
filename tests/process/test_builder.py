"""Models that workers build themselves: the bits of local training, and refusals that say what to do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchslicer as ts
from tests.support import builders
from tests.support.builders import CASES
from tests.support.cluster import Peers, worker_program
from tests.support.driver import Recorder
from tests.support.leak_police import LATE_THREADS
from tests.support.models import MLP
from tests.support.nets_boundary import Raising
from tests.support.oracle import ADAM, SGD, Result, assert_same_bits, snapshot
from torchslicer.cluster.shipping.stage_codec import encode_stage
from torchslicer.config import RunConfig
from torchslicer.discovery import StaticDiscovery
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.pipeline.stage import find_routes
from torchslicer.simulation import simulated

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning"),
]

HOME = "tests.support.builders"
MANY = [
    ("mlp", 3), ("gpt", 3), ("unet", 3), ("lstm", 2), ("resnet18", 2), ("weight_norm", 2), ("views", 2),
    ("custom_function", 2), ("functional_dropout", 2), ("batchnorm_conv", 3), ("dense", 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def yard() -> Iterator[DistributedExecutor]:
    """Three workers that trust nothing, and call the functions of one module."""
    patient = RunConfig.create(fault_tolerance__ping_timeout_s=60.0)  # a test in between may hold the interpreter
    with simulated(3, threads=1, allow_builder=[f"{HOME}:*", "only_here"], run_config=patient) as executor:
        # A control channel starts a thread when it first has to queue something large.
        late = {f"send to {member.control.peer}" for member in executor.coordinator.live()}
        LATE_THREADS.update(late)
        yield executor
        LATE_THREADS.difference_update(late)


def train(sliced: Any, batches: Any, optimizer: Any, criterion: Any, **options: Any) -> Result:
    """Train and return what came out."""
    recorder = Recorder()
    history = sliced.train(batches, optimizer, criterion, callbacks=[recorder], epochs=1, run_dir=False, **options)
    return Result(snapshot(sliced.model), recorder.losses(), (), sliced.model, history)


def assert_exact(
    executor: Any, name: str, arguments: dict[str, Any], batches: Any, *, n: int, criterion: Any = "cross_entropy",
    optimizer: Any = SGD, slice_options: Any = None, **options: Any,
) -> None:  # fmt: skip
    """Fail unless workers that build the model give the bits of training it here."""
    slice_options = {"n": n, "builder_args": arguments, **(slice_options or {})}
    here = ts.slice(f"{HOME}:{name}", **slice_options)
    there = ts.slice(f"{HOME}:{name}", executor=executor, **slice_options)
    there.load_state_dict(here.state_dict())  # builders give other weights at each call
    want = train(here, batches, optimizer, criterion, **options)
    got = train(there, batches, optimizer, criterion, **options)
    assert_same_bits(got, want, where=str(arguments or name))


def assert_case(executor: Any, name: str, *, n: int, slice_options: Any = None, **options: Any) -> None:
    case = CASES[name]
    assert_exact(
        executor, "make_case", {"name": name, "dropout": 0.1}, case.batches(3), n=n, criterion=case.criterion(),
        slice_options=slice_options, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "n"), MANY)
def test_workers_that_build_the_model_give_the_bits_of_local_training(
    yard: DistributedExecutor, name: str, n: int
) -> None:
    assert_case(yard, name, n=n, n_micro_batches=2, schedule="1f1b")


def test_a_model_that_no_description_carries(yard: DistributedExecutor) -> None:
    sliced = ts.slice(f"{HOME}:make_unusual", n=3)
    graph = sliced.graph
    with pytest.raises(ts.ShippingError):
        encode_stage(graph, 0, (0, 1, 2), find_routes(graph, (0, 1, 2)))
    assert_exact(yard, "make_unusual", {"width": 4}, MLP.batches(3), n=3, optimizer=ADAM, n_micro_batches=2)


def test_a_forward_pass_that_asks_a_parameter_where_it_is(yard: DistributedExecutor) -> None:
    """Without memory it is at another place, which the trace has in it."""
    assert_exact(yard, "make_constant", {}, MLP.batches(2), n=2)


def test_a_packed_model(yard: DistributedExecutor) -> None:
    assert_case(yard, "moe", n=3, slice_options={"pack": builders.pack_moe}, n_micro_batches=2)


def test_a_model_that_only_torch_export_sees_travels_as_data(yard: DistributedExecutor) -> None:
    [name] = [name for name, case in CASES.items() if case.needs_example][:1]
    assert_case(yard, name, n=2, slice_options={"example": CASES[name].example()})


def test_flags_and_frozen_parameters_are_the_callers(yard: DistributedExecutor) -> None:
    results = []
    for executor in (None, yard):
        sliced = ts.slice(f"{HOME}:make_case", n=2, builder_args={"name": "batchnorm_conv"}, executor=executor)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sliced.load_state_dict({k: v if v.dtype == torch.long else torch.rand_like(v)
                                    for k, v in sliced.state_dict().items()})  # fmt: skip
        sliced.model[1].eval()
        sliced.model[3].requires_grad_(False)
        results.append(train(sliced, CASES["batchnorm_conv"].batches(2), SGD, "cross_entropy"))
    assert_same_bits(results[1], results[0])
    assert not results[1].model[3].weight.requires_grad


def assert_only_its_own(sliced: ts.SlicedModel, folder: Path) -> None:
    """Train, and fail unless each worker's memory holds the parameters of its stage, once, and no others."""
    x, y = torch.randn(4, 64), torch.randint(64, (4,))
    for _ in range(2):  # what the first run leaves is not to stay, either
        sliced.train([(x, y)] * 2, ADAM, "cross_entropy", epochs=1, run_dir=False)
        found = sorted(json.loads(path.read_text()) for path in folder.iterdir() if path.stem in _pids())
        assert found == sorted([[64 * 32], sorted([32 * 48, 48]), sorted([48 * 32, 32, 64 * 32])])


@pytest.mark.parametrize("values", [False, True])
def test_a_worker_that_builds_the_model_keeps_its_stage_only(
    yard: DistributedExecutor, tmp_path: Path, values: bool
) -> None:
    arguments = {"folder": str(tmp_path), "values": values}
    sliced = ts.slice(f"{HOME}:make_census", builder_args=arguments, cuts=["2", "4"], executor=yard)
    assert_only_its_own(sliced, tmp_path)


def test_a_worker_that_is_sent_its_stage_holds_nothing_else(pool: DistributedExecutor, tmp_path: Path) -> None:
    sliced = ts.slice(builders.make_census(str(tmp_path)), cuts=["2", "4"], executor=pool)
    assert_only_its_own(sliced, tmp_path)


def test_nothing_stays_of_a_run_that_failed(pool: DistributedExecutor, tmp_path: Path) -> None:
    raising = ts.slice(nn.Sequential(Raising(), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4)), n=3, executor=pool)
    batches = [(torch.randn(8, 16), torch.randint(4, (8,)))] * 4
    with pytest.raises(ts.StageError, match="boom"):
        raising.train(batches, ADAM, "cross_entropy", epochs=1, run_dir=False)
    sliced = ts.slice(builders.make_census(str(tmp_path)), cuts=["2", "4"], executor=pool)
    assert_only_its_own(sliced, tmp_path)


def _pids() -> set[str]:
    """Process ids of the children of this process."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="utf-8").split())


def test_a_worker_that_allows_nothing(peers: Peers) -> None:
    with peers.driver() as executor:
        sliced = ts.slice(f"{HOME}:make_case", n=2, builder_args={"name": "mlp"}, executor=executor)
        words = f"peer-0.*does not allow.*make_case.*start it with --allow-builder {HOME}:make_case"
        with pytest.raises(ts.ShippingError, match=words):
            sliced.train(MLP.batches(1), SGD, "cross_entropy", epochs=1, run_dir=False)


def test_a_peer_and_the_first_stage_here() -> None:
    """The process that the driver starts allows what it needs; the peer was started by somebody else."""
    with worker_program("--listen", "127.0.0.1:0", "--allow-builder", HOME) as peer:
        discovery = StaticDiscovery([peer.wait_for(r"listening for a driver on (\S+)")[1]])
        with DistributedExecutor(discovery, host_stage=0, host_threads=1) as executor:
            assert_case(executor, "mlp", n=2)


def test_simulate_allows_what_it_is_asked_to_build() -> None:
    packed = {"pack": builders.pack_moe, "builder_args": {"name": "moe"}}
    history = ts.simulate(
        f"{HOME}:make_case", CASES["moe"].batches(2), SGD, "cross_entropy", n=2, threads=1, trust=[], epochs=1,
        run_dir=False, **packed,
    )  # fmt: skip
    assert len(history) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("make_random", r"makes another model here than on the caller's side: \"module '0' \(Unusual\)\" differs"),
        ("make_elsewhere", r"another model here.*module '1' \(Dropout\).*must be moved into the builder"),
    ],
)
def test_a_builder_that_makes_another_model_there(yard: DistributedExecutor, name: str, words: str) -> None:
    sliced = ts.slice(f"{HOME}:{name}", n=2, executor=yard)
    with pytest.raises(ts.ShippingError, match=words):
        sliced.train(MLP.batches(1), SGD, "cross_entropy", epochs=1, run_dir=False)
    assert_case(yard, "mlp", n=3)  # the workers are free for the next run


def test_a_model_changed_after_it_was_built(yard: DistributedExecutor) -> None:
    sliced = ts.slice(f"{HOME}:make_case", n=2, builder_args={"name": "mlp"}, executor=yard)
    sliced.model[8] = torch.nn.Linear(32, 4, bias=False)
    with pytest.raises(ts.ShippingError, match=r"module '8' \(Linear\).*changed in a model after it was built"):
        sliced.train(MLP.batches(1), SGD, "cross_entropy", epochs=1, run_dir=False)


def test_a_builder_that_fails_there(yard: DistributedExecutor, tmp_path: Path) -> None:
    sliced = ts.slice(f"{HOME}:make_failing", n=2, builder_args={"folder": str(tmp_path)}, executor=yard)
    with pytest.raises(ts.ShippingError, match=r"make_failing' raised here OSError: the disk with the vocabulary"):
        sliced.train(MLP.batches(1), SGD, "cross_entropy", epochs=1, run_dir=False)
    assert_case(yard, "mlp", n=3)


def test_a_worker_without_the_package(
    yard: DistributedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers were started before the module was there, and do not look into its folder."""
    (tmp_path / "only_here.py").write_text("from tests.support.models import mlp4\n\ndef make():\n    return mlp4()\n")
    monkeypatch.syspath_prepend(tmp_path)
    sliced = ts.slice("only_here:make", n=2, executor=yard)
    with pytest.raises(ts.ShippingError, match=r"module 'only_here' cannot be imported here.*install its package"):
        sliced.train(MLP.batches(1), SGD, "cross_entropy", epochs=1, run_dir=False)
    monkeypatch.delitem(sys.modules, "only_here")
    assert_case(yard, "mlp", n=3)


def test_a_pack_function_that_workers_cannot_find(yard: DistributedExecutor) -> None:
    sliced = ts.slice(
        f"{HOME}:make_case", n=2, builder_args={"name": "mlp"}, pack=lambda model: [model[:4], model[4:]], executor=yard
    )
    with pytest.raises(ts.ShippingError, match=r"pack:.*lambda.*define it in a module beside the builder"):
        sliced.train(MLP.batches(1), SGD, "cross_entropy", epochs=1, run_dir=False)


@pytest.mark.parametrize(
    ("reference", "error", "words"),
    [
        ("tests.support.builders:make_cas", ts.ShippingError, "did you mean 'make_case'"),
        ("tests.support.builders", ts.ShippingError, "expected a name such as"),
        ("no_such_package:make", ts.ShippingError, "cannot be imported here"),
        ("tests.support.builders:CASES", ts.ShippingError, "is no function or class, but a dict"),
        ("tests.support.builders:gc.collect", ts.ShippingError, "is no function or class"),
        ("tests.support.builders:Path", ts.ShippingError, "defined in another module; write 'pathlib"),
        ("tests.support.builders:make_nothing", ts.ShippingError, "must return a torch.nn.Module, got a object"),
        ("subprocess:run", ts.ShippingError, "the standard library and torch could run anything"),
        (3, ts.ConfigError, "or the name of a function that makes one, got int"),
    ],
)
def test_names_that_lead_nowhere(reference: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ts.slice(reference, n=2)


def test_arguments_of_a_builder() -> None:
    with pytest.raises(ts.ConfigError, match="builder_args are for a model given by name"):
        ts.slice(MLP.model(), n=2, builder_args={"width": 3})
    with pytest.raises(ts.ShippingError, match="an argument is a Tensor; use what JSON has"):
        ts.slice(f"{HOME}:make_unusual", n=2, builder_args={"width": torch.ones(1)})

"""The driver frees its copy of the weights while workers hold them: memory, bits, and what is said of lost ones."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchslicer as ts
from tests.support.cluster import Program, write_script
from tests.support.driver import train_case
from tests.support.models import BN_MLP, GPT_CASE, MLP
from tests.support.oracle import ADAM, SGD, assert_same_bits, snapshot
from torchslicer.executors.distributed import DistributedExecutor
from torchslicer.executors.released import fill, release

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("one_thread")]

OPTIONS: dict[str, Any] = {"epochs": 1, "run_dir": False}


@pytest.fixture
def freeing(pool: DistributedExecutor) -> Iterator[DistributedExecutor]:
    """The executor of the pool, told to free weights."""
    pool.free_local_weights = True
    yield pool
    pool.free_local_weights = False


class During(ts.TrainingCallback):
    """Calls a function after each step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Call it."""
        self.function()


def bytes_in_memory() -> int:
    """Bytes of all tensors of this process on the CPU, what shares memory counted once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if not t.is_meta and t.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_the_memory_is_free_while_workers_train(freeing: DistributedExecutor) -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1000))  # 8 MB
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    sliced = ts.slice(model, n=2, executor=freeing)
    before, during = bytes_in_memory(), list[int]()
    callback = During(lambda: during.append(bytes_in_memory()))
    sliced.train([(torch.ones(2, 1000), torch.ones(2, 1000))] * 2, SGD, "mse", callbacks=[callback], **OPTIONS)
    assert max(during) < before - size + 100_000
    assert abs(bytes_in_memory() - before) < 100_000


RESIDENT = """
import gc, os, sys, torch, torchslicer as ts
from torch import nn
from torchslicer.simulation import simulated

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20

class Note(ts.TrainingCallback):
    def on_step_end(self, step, metrics):
        found.append(resident())

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4000, 4000), nn.Linear(4000, 4000))  # 2 x 61 MiB
found = []
with simulated(2, threads=1) as executor:
    sliced = ts.slice(model, n=2, executor=executor)
    executor.free_local_weights = True
    batches = [(torch.ones(1, 4000), torch.ones(1, 4000))] * 3
    before = resident()
    sliced.train(batches, "SGD", "mse", epochs=1, run_dir=False, callbacks=[Note()])
print("MiB", before, found[-1], resident())
"""


def test_the_process_gets_smaller(tmp_path: Path) -> None:
    with Program([write_script(tmp_path, RESIDENT)]) as program:
        assert program.wait(timeout_s=100.0) == 0, program.output
        before, during, _ = map(int, program.wait_for(r"MiB (\d+) (\d+) (\d+)").groups())
    assert during < before - 60  # of 122 MiB; some of what training needs is loaded only then


@pytest.mark.parametrize("case", [GPT_CASE, BN_MLP], ids=lambda case: case.name)
def test_the_weights_come_back_and_are_those_of_local_training(freeing: DistributedExecutor, case: Any) -> None:
    options: dict[str, Any] = {"n": 3, "steps": 3, "dropout": 0.1, "max_grad_norm": 0.1}
    want = train_case(case, ADAM, **options)
    got = train_case(case, ADAM, slice_options={"executor": freeing}, **options)
    assert_same_bits(got, want)
    assert got.model is not None
    assert all(type(parameter) is nn.Parameter for parameter in got.model.parameters())


def test_parameters_stay_the_same_objects_with_their_layout(freeing: DistributedExecutor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(144, 4))
    first = model[0].weight
    first.label = "first"
    model[2].bias.requires_grad_(False)
    identities = [id(parameter) for parameter in model.parameters()]
    before = snapshot(model)
    sliced = ts.slice(model, n=2, executor=freeing)
    sliced.train([(torch.ones(2, 3, 8, 8), torch.ones(2, dtype=torch.long))], SGD, "cross_entropy", **OPTIONS)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert first.label == "first"
    assert not torch.equal(first, before["0.weight"])
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert not model[2].bias.requires_grad
    assert torch.equal(model[2].bias, before["2.bias"])


def test_gradient_hooks_come_back_with_the_weights() -> None:
    """They are called again after a run, which cannot have had them: models with hooks are refused, or built there."""
    model = MLP.model()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    graph, before = ts.slice(model, n=2).graph, snapshot(model)
    release(graph)
    assert "released" in repr(model[0].weight)
    fill(graph, before)
    model(MLP.batches(1)[0][0]).sum().backward()
    assert not model[0].weight.grad.any()
    assert model[2].weight.grad.any()


def test_gradient_hooks_are_refused_before_anything_runs(pool: DistributedExecutor) -> None:
    """A worker would train without them."""
    model = MLP.model()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ts.ShippingError, match=r"module '0' .*'weight': it has gradient hooks, which are code; remove"):
        ts.slice(model, n=2, executor=pool).train(MLP.batches(1), SGD, "cross_entropy", **OPTIONS)


def test_state_dict_fetches_the_weights_while_workers_train(freeing: DistributedExecutor) -> None:
    """After step k it holds what training for k steps gives, whether the driver keeps its copy or not."""
    batches, found = GPT_CASE.batches(3), []
    for free in (True, False):
        freeing.free_local_weights = free
        sliced = ts.slice(model := GPT_CASE.model(), n=2, executor=freeing)
        states: list[dict[str, torch.Tensor]] = []
        callback = During(lambda sliced=sliced, states=states: states.append(sliced.state_dict()))
        sliced.train(batches, SGD, GPT_CASE.criterion(), callbacks=[callback], **OPTIONS)
        found.append(states)
        assert list(states[-1]) == list(model.state_dict())
        assert all(torch.equal(states[-1][name], tensor) for name, tensor in model.state_dict().items())
    short = train_case(GPT_CASE, SGD, n=2, steps=2, batches=batches[:2])
    for states in found:
        assert all(torch.equal(states[1][name], tensor) for name, tensor in short.state.items() if name in states[1])


def test_whatever_needs_the_weights_meanwhile_says_where_they_are(freeing: DistributedExecutor) -> None:
    model, batch = MLP.model(), MLP.batches(1)[0]
    sliced = ts.slice(model, n=2, executor=freeing)
    uses = [
        lambda: model(batch[0]), model.state_dict, lambda: copy.deepcopy(model), model.double,
        lambda: model[0].weight + 1, lambda: torch.equal(model[0].weight, model[0].weight),
        lambda: model[0].weight.data, lambda: sliced.load_state_dict(MLP.model().state_dict()),
    ]  # fmt: skip
    said: list[str] = []

    def use() -> None:
        for function in uses:
            with pytest.raises((ts.RunError, ts.ConfigError)) as caught:
                function()
            said.append(str(caught.value))
        said.append(repr(model[0].weight))
        assert torch.equal(sliced.predict([batch]), sliced.predict([batch]))  # workers do that

    sliced.train([batch], SGD, "cross_entropy", callbacks=[During(use)], **OPTIONS)
    assert len(said) == len(uses) + 1
    assert all("released" in words for words in said)


def fail() -> None:
    """Fail."""
    raise ValueError("on purpose")


def test_after_a_failed_run_the_model_says_so_until_weights_are_loaded(freeing: DistributedExecutor) -> None:
    model, batches = MLP.model(), MLP.batches(2)
    sliced = ts.slice(model, n=2, executor=freeing)
    before = snapshot(model)
    with pytest.raises(ts.CallbackError, match="on purpose"):
        sliced.train(batches, SGD, "cross_entropy", callbacks=[During(fail)], **OPTIONS)
    uses = [
        lambda: sliced.predict(batches), lambda: sliced.evaluate(batches, "cross_entropy"), sliced.state_dict,
        sliced.merge, lambda: sliced.gradients(batches[0], "cross_entropy"), lambda: model(batches[0][0]),
        lambda: sliced.train(batches, SGD, "cross_entropy", **OPTIONS),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ts.RunError, match=r"lost: load some with sliced.load_state_dict"):
            use()
    with pytest.raises(ts.ConfigError, match=r"lost its weights, and these are not given: \['2.weight'"):
        sliced.load_state_dict({"0.weight": before["0.weight"], "0.bias": before["0.bias"]}, strict=False)
    with pytest.raises(ts.ConfigError, match=r"'0.weight': expected \(32, 16\), got \(1,\)"):
        sliced.load_state_dict({**before, "0.weight": torch.ones(1)})
    sliced.load_state_dict(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(model).items())
    want = train_case(MLP, SGD, n=2, steps=2, batches=batches)
    sliced.train(batches, SGD, "cross_entropy", **OPTIONS)
    assert all(torch.equal(tensor, want.state[name]) for name, tensor in snapshot(model).items())

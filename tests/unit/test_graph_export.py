from __future__ import annotations

import dataclasses
import logging
import random
import threading
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchslicer.errors import DataError, SliceError, StageError, TraceError
from torchslicer.graph.auxloss import add_aux_loss, collect_aux_losses
from torchslicer.graph.checks import check_relation, check_size, check_value, evaluate, unpack
from torchslicer.graph.export import trace_export
from torchslicer.graph.fx import trace_fx
from torchslicer.graph.model import ModelGraph
from torchslicer.pipeline.buffers import preserved_buffers
from torchslicer.pipeline.rng import preserved_rng
from torchslicer.pipeline.verify import run_whole, verify


def observe(model: nn.Module, call: Any) -> tuple[list[Any], list[Any], list[torch.Tensor]]:
    """Outputs, gradients and buffers of one run."""
    with preserved_rng(), preserved_buffers(model):
        torch.manual_seed(3)
        outputs = pytree.tree_leaves(call())
        wanted = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        parameters = [p for p in model.parameters() if p.requires_grad]
        weights = [torch.linspace(0.5, 1.5, leaf.numel()).to(leaf.dtype).view(leaf.shape) for leaf in wanted]
        gradients = torch.autograd.grad(wanted, parameters, weights, allow_unused=True) if wanted else []
        return outputs, list(gradients), [buffer.clone() for buffer in model.buffers()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def assert_same_bits(graph: ModelGraph, **inputs: Any) -> None:
    verify(graph, inputs, gradients=True)
    expected = observe(graph.model, lambda: graph.model(**inputs))
    found = observe(graph.model, lambda: run_whole(graph, inputs))
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def unit_names(graph: ModelGraph) -> list[str]:
    return [unit.name for unit in graph.units]


class ShapeFlow(nn.Module):
    """Python control flow over shapes and ``isinstance`` in the root: not for torch.fx."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            raise TypeError("no matrix")
        hidden = torch.relu_(self.first(x))
        for _ in range(x.shape[1] // 2):
            hidden = hidden + 1
        hidden = self.drop(self.norm(hidden)) if self.training else hidden * 2
        return self.last(hidden) * (1 / x.shape[0])


def test_the_root_that_fx_cannot_trace_has_the_same_bits_on_any_batch_size():
    model = ShapeFlow()
    with pytest.raises(TraceError):
        trace_fx(model, ["x"])
    graph = trace_export(model, {"x": torch.randn(6, 4)})
    assert graph.source == "export"
    assert unit_names(graph) == ["first", "norm", "drop", "last"]
    assert graph.modules == {"norm": model.norm}
    assert graph.units[1].parameters == ("norm.weight", "norm.bias")
    assert set(graph.units[1].buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for size in (6, 3, 11):
        assert_same_bits(graph, x=torch.randn(size, 4))


def test_batch_norm_buffers_are_the_models_own_and_change_when_run():
    model = ShapeFlow()
    graph = trace_export(model, {"x": torch.randn(6, 4)})
    assert int(model.norm.num_batches_tracked) == 0
    run_whole(graph, {"x": torch.randn(5, 4)})
    assert int(model.norm.num_batches_tracked) == 1
    assert not torch.equal(model.norm.running_mean, torch.zeros(8))


def test_evaluation_mode_is_another_graph():
    model = ShapeFlow().eval()
    graph = trace_export(model, {"x": torch.randn(6, 4)})
    assert unit_names(graph) == ["first", "last"]
    assert_same_bits(graph, x=torch.randn(2, 4))


class Tokens(nn.Module):
    """Tied weights, a mask, a flag, an LSTM, a nested input, ``no_grad`` and autocast, many outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.full((8,), 0.5)
        self.register_buffer("ticks", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, ids, mask=None, *, extra, flag=False):
        self.ticks.add_(1)
        hidden, _ = self.lstm(self.embed(ids))
        with torch.no_grad():
            still = hidden * 3
            with torch.enable_grad():
                still = still + hidden
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.head(hidden)
        if mask is not None:
            hidden = hidden.masked_fill(~mask.unsqueeze(-1), 0.0)
        for item in extra["adds"]:
            hidden = hidden + item[:, None]
        if flag:
            hidden = hidden * self.scale + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        return {"logits": self.head(hidden), "rest": (low, [still, None, flag]), "size": ids.shape[0]}


def tokens_batch(size: int, length: int) -> dict[str, Any]:
    return {
        "ids": torch.randint(0, 20, (size, length)),
        "mask": torch.rand(size, length) > 0.3,
        "extra": {"adds": [torch.randn(size, 8), torch.randn(size, 1)]},
        "flag": True,
    }


def test_token_model_has_the_same_bits_at_other_batch_and_sequence_sizes():
    model = Tokens()
    model.lstm = nn.Identity()
    model.lstm.forward = lambda x: (x * 2, None)  # an LSTM fixes the length of the sequence
    graph = trace_export(model, tokens_batch(4, 6))
    for size, length in ((4, 6), (3, 6), (5, 9), (1, 4)):
        assert_same_bits(graph, **tokens_batch(size, length))


def test_lstm_model_is_cut_at_its_modules_and_ties_have_the_first_name():
    model = Tokens()
    weights = list(model.lstm._flat_weights)
    graph = trace_export(model, tokens_batch(4, 6))
    assert unit_names(graph) == ["embed", "lstm", "head", "head"]
    assert graph.shared == {"embed.weight": (0, 2, 3)}
    assert all(a is b for a, b in zip(weights, model.lstm._flat_weights, strict=True))
    assert set(graph.constants) == {"scale", "lifted_tensor_0"}
    assert graph.constants["scale"] is model.scale
    assert_same_bits(graph, **tokens_batch(4, 6))
    assert_same_bits(graph, **tokens_batch(2, 6))


def test_what_the_export_fixed_is_checked_when_run():
    graph = trace_export(Tokens(), tokens_batch(4, 6))
    for change, message in (
        ({"flag": False}, "input 'flag': expected True, got False"),
        ({"mask": None}, "input 'mask': expected a tensor|mask"),
        ({"extra": {"adds": [torch.randn(4, 8)]}}, "input 'extra\\['adds'\\]': expected 2 item"),
        ({"extra": {"subs": []}}, "input 'extra': expected the keys \\['adds'\\]"),
    ):
        with pytest.raises((StageError, DataError), match=message):
            run_whole(graph, {**tokens_batch(4, 6), **change})


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, y):
        return [self.linear(x).view(4, 3), y][:: 1 if len(x) == 4 else 2]


def test_a_batch_dimension_that_cannot_be_dynamic_is_checked_when_run():
    graph = trace_export(FixedBatch(), {"x": torch.randn(4, 3), "y": torch.randn(4)})
    assert_same_bits(graph, x=torch.randn(4, 3), y=torch.randn(9))
    with pytest.raises((StageError, DataError), match=r"input 'x': expected size 4 in dimension 0, got shape \(5, 3\)"):
        run_whole(graph, {"x": torch.randn(5, 3), "y": torch.randn(5)})


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, y):
        x = self.linear(x)
        if x.shape[0] > 3:
            x = x * 2
        if x.shape[0] % 2 == 0:
            x = x + 1
        return x + y


@pytest.mark.parametrize(("size", "other"), [(3, 3), (5, 5), (4, 1)])
def test_a_batch_that_takes_another_path_is_refused(size, other):
    graph = trace_export(Branches(), {"x": torch.randn(4, 3), "y": torch.randn(4, 3)})
    assert_same_bits(graph, x=torch.randn(6, 3), y=torch.randn(6, 3))
    with pytest.raises((StageError, DataError), match=r"expected x\.shape"):
        run_whole(graph, {"x": torch.randn(size, 3), "y": torch.randn(other, 3)})


def test_an_example_of_one_sample_leaves_the_batch_open():
    graph = trace_export(ShapeFlow().eval(), {"x": torch.randn(1, 4)})
    for size in (1, 2, 5):
        assert_same_bits(graph, x=torch.randn(size, 4))


Point = namedtuple("Point", "x y")  # noqa: PYI024


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor


pytree.register_pytree_node(
    Result,
    lambda value: ([value.loss, value.logits], ["loss", "logits"]),
    lambda values, names: Result(**dict(zip(names, values, strict=True))),
    serialized_type_name="tests.Result",
)


class Returns(nn.Module):
    def __init__(self, build):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.build = build

    def forward(self, x):
        return self.build(self.linear(x), x, self.linear.weight)


@pytest.mark.parametrize(
    "build",
    [
        lambda y, x, w: y,
        lambda y, x, w: (y,),
        lambda y, x, w: [y, (x, None, 3, "text"), {"w": w}],
        lambda y, x, w: OrderedDict(b=y, a=x),
        lambda y, x, w: Point(y, x),
        lambda y, x, w: Result(y.mean(), y),
    ],
)
def test_the_output_has_the_structure_that_the_model_returns(build):
    model = Returns(build)
    graph = trace_export(model, {"x": torch.randn(4, 2)})
    inputs = {"x": torch.randn(3, 2)}
    expected, found = model(**inputs), run_whole(graph, inputs)
    assert type(found) is type(expected)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    assert_same_bits(graph, **inputs)


def test_attention_and_repeated_modules_form_one_unit_per_call():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
            self.gain = nn.Parameter(torch.ones(8))

        def forward(self, x, **options):
            x = x + self.attention(x, x, x)[0]
            for block in self.blocks:
                x = block(block(x)) * options["factor"]
            return x * self.gain

    inputs = {"x": torch.randn(4, 5, 8), "factor": torch.ones(4, 1, 1)}
    graph = trace_export(Model(), inputs)
    calls = [f"blocks.{b}.{layer}" for b in range(2) for _ in range(2) for layer in range(2)]
    assert unit_names(graph) == ["attention", *calls, "gain"]
    assert_same_bits(graph, x=torch.randn(2, 5, 8), factor=torch.randn(2, 1, 1))


def test_forward_under_no_grad_is_kept():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        @torch.no_grad()
        def forward(self, x):
            return self.linear(x) * x.shape[0]

    graph = trace_export(Frozen(), {"x": torch.randn(4, 2)})
    assert not run_whole(graph, {"x": torch.randn(3, 2)}).requires_grad


def test_auxiliary_losses_are_kept():
    class Model(ShapeFlow):
        def forward(self, x):
            add_aux_loss(self.first(x).square().mean(), 0.25)
            return super().forward(x)

    model = Model().eval()
    graph = trace_export(model, {"x": torch.randn(4, 4)})
    x = torch.randn(3, 4)
    with collect_aux_losses() as expected:
        model(x)
    with collect_aux_losses() as found:
        run_whole(graph, {"x": x})
    assert [weight for _, weight in found] == [0.25]
    assert torch.equal(found[0][0], expected[0][0])


class DataDependent(nn.Module):
    def forward(self, x):
        return x * 2 if x.mean() > 0 else x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class CustomFunction(nn.Module):
    def forward(self, x):
        return Twice.apply(x)


class Conditional(nn.Module):
    def forward(self, x):
        return torch.cond(x.mean() > 0, lambda a: a * 2, lambda a: a + 1, (x,))


class Unregistered(nn.Module):
    def forward(self, x):
        return object()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DataDependent(), "torch.export: .*data-dependent.*return x \\* 2 if"),
        (CustomFunction(), "drop the backward pass of the autograd function Twice"),
        (Conditional(), "higher-order operation cond"),
        (Unregistered(), "torch.export: "),
    ],
)
def test_what_cannot_be_exported_is_refused_in_silence(model, message, capfd, caplog):
    apply = vars(torch.autograd.Function)["apply"]
    with caplog.at_level(logging.WARNING), pytest.raises(TraceError, match=message) as caught:
        trace_export(model, {"x": torch.randn(4, 2, requires_grad=True)})
    assert len(str(caught.value)) < 600
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert vars(torch.autograd.Function)["apply"] is apply


class CachedOutput(nn.Module):
    class Cache:
        pass

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"use_cache": True})()

    def forward(self, x):
        return x + x.shape[0], self.Cache()


def test_a_cache_in_the_output_is_refused_with_the_remedy():
    with pytest.raises(TraceError, match=r"set model\.config.use_cache = False"):
        trace_export(CachedOutput(), {"x": torch.randn(4, 2)})


def test_another_thread_keeps_its_autograd_functions_while_a_model_is_exported():
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert done.wait(10)
            return x + x.shape[0]

    results: list[Any] = []
    worker = threading.Thread(target=lambda: results.append(trace_export(Waits(), {"x": torch.randn(4, 2)})))
    worker.start()
    assert inside.wait(10)
    x = torch.ones(2, requires_grad=True)
    Twice.apply(x).sum().backward()
    done.set()
    worker.join(10)
    assert results[0].source == "export"
    assert torch.equal(x.grad, torch.full((2,), 5.0))


def test_backward_hooks_are_refused():
    model = ShapeFlow()
    model.first.register_full_backward_hook(lambda *_: None)
    with pytest.raises(TraceError, match="'first' has backward hooks"):
        trace_export(model, {"x": torch.randn(4, 4)})


class Remembers(ShapeFlow):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.seen = []
        self.count = 0

    def forward(self, x):
        random.random()
        self.count += 1
        self.seen.append(x)
        setattr(self, self.name, x.mean())
        return super().forward(x)


def test_a_hidden_loss_is_refused():
    with pytest.raises(SliceError, match="stores a loss in its attribute 'aux_loss'"):
        trace_export(Remembers("aux_loss"), {"x": torch.randn(4, 4)})


def test_the_model_and_the_generators_are_left_as_they_were():
    model = Remembers("kept")
    model.drop.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    tensors = {
        name: (tensor, tensor.clone(), tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    state, python_state, filters = torch.get_rng_state(), random.getstate(), list(warnings.filters)
    trace_export(model, {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))})
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before
    assert model.seen == []
    assert not model.drop.training
    for name, tensor in model.state_dict(keep_vars=True).items():
        original, copy, version = tensors[name]
        assert tensor is original
        assert torch.equal(tensor, copy)
        assert tensor._version == version
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert list(warnings.filters) == filters


# --------------------------------------------------------------------------------------------------------------- checks


def test_check_size_says_what_is_wrong():
    check_size(torch.zeros(2, 3), 1, 3, "x")
    with pytest.raises(DataError, match=r"input 'x': expected size 4 in dimension 1, got shape \(2, 3\)"):
        check_size(torch.zeros(2, 3), 1, 4, "x")
    with pytest.raises(DataError, match="dimension 2"):
        check_size(torch.zeros(2, 3), 2, 3, "x")
    with pytest.raises(DataError, match="got NoneType"):
        check_size(None, 0, 3, "x")


@pytest.mark.parametrize(("value", "expected"), [(1, True), (None, 1), (torch.ones(2), None), ("a", "b")])
def test_check_value_refuses_another_value(value, expected):
    check_value(expected, expected, "flag")
    with pytest.raises(DataError, match="input 'flag': expected"):
        check_value(value, expected, "flag")


def test_unpack_takes_items_by_key_or_position():
    assert unpack([1, 2], 2, "x") == (1, 2)
    assert unpack({"b": 1, "a": 2}, ("a", "b"), "x") == (2, 1)
    with pytest.raises(DataError, match="got int"):
        unpack(3, 2, "x")


def test_check_relation_names_the_inputs():
    with pytest.raises(DataError, match=r"'x' \(2, 3\), 'y' \(3,\): expected x.shape\[0\] == y.shape\[0\]"):
        check_relation("sizes[0][0] == sizes[1][0]", ("x", "y"), torch.zeros(2, 3), torch.zeros(3))


@pytest.mark.parametrize(
    ("relation", "value"),
    [
        ("-sizes[0][0] + 5 * 2 // 3 == 1", True),
        ("not (sizes[0][0] % 2 == 1 or sizes[0][1] < 3)", True),
        ("1 < sizes[0][0] <= 2 ** 1 and sizes[0][1] != 3", False),
        ("sizes[0][1] / 2 >= 1.5", True),
    ],
)
def test_evaluate_knows_arithmetic(relation, value):
    assert evaluate(relation, [(2, 3)]) is value


@pytest.mark.parametrize("relation", ["__import__('os')", "sizes.clear()", "sizes[0][0] | 1", "other"])
def test_evaluate_runs_nothing_else(relation):
    with pytest.raises(ValueError, match="cannot evaluate"):
        evaluate(relation, [(2, 3)])

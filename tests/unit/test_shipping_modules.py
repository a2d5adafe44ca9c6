"""Modules through plain data and back: what is kept, what is refused on either side, and that nothing runs."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from torchslicer.cluster.shipping.allow import Allowed
from torchslicer.cluster.shipping.modules import encode_module
from torchslicer.cluster.shipping.restore import decode_module
from torchslicer.cluster.shipping.values import dump, load
from torchslicer.errors import ShippingError

PACKAGE = """
import argparse, dataclasses, enum, types
from collections import namedtuple
from typing import Any
import torch
from torch import nn
from functools import cached_property

CANARY = {canary!r}

def touch(*args, **kwargs):
    open(CANARY, "w").close()

def act(x):
    return torch.relu(x) * 2

class Kind(enum.Enum):
    PRE = "pre"
    POST = "post"

Size = namedtuple("Size", "width height")

@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4
    kind: Kind = Kind.PRE

class Net(nn.Module):
    forward_calls = 0
    act = None

    def __init__(self, config):
        super().__init__()
        touch()
        self.config, self.kind, self.size = config, Kind.POST, Size(1, 2)
        self.args = argparse.Namespace(depth=3, names=["a"])
        self.more = types.SimpleNamespace(x=1.5)
        self.function = act
        self.norm = nn.LayerNorm
        self.first = nn.Linear(config.width, config.width)
        self.layers = [self.first]
        self.scale = torch.ones(1)

    @cached_property
    def heavy(self):
        return object()

    def forward(self, x):
        return self.function(self.first(x)) * self.scale

class Nasty(nn.Module):
    def __setstate__(self, state):
        touch()

class Reduced(nn.Module):
    def __reduce__(self):
        return touch, ()

class Newed(nn.Module):
    def __new__(cls, *args, **kwargs):
        touch()
        return super().__new__(cls)

class Slotted(nn.Module):
    __slots__ = ("extra",)

class Scripted(torch.jit.ScriptModule):
    pass

class SetOnly:
    def __set__(self, owner, value):
        touch()

class WithProperty(nn.Module):
    @property
    def width(self):
        return 1

class Plain:
    pass
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of a user's; the file ``canary`` is made when code of it runs that must not."""
    import importlib

    folder = tmp_path / "acme_nets"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "blocks.py").write_text(PACKAGE.format(canary=str(tmp_path / "canary")))
    (folder / "__main__.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("acme_nets.blocks")
    for name in [name for name in sys.modules if name.split(".")[0] == "acme_nets"]:
        del sys.modules[name]


TRUST = Allowed(["acme_nets"])


def through(module: nn.Module, allowed: Allowed = TRUST) -> nn.Module:
    description, tensors = encode_module(module)
    return decode_module(load(dump(description)), {name: t.clone() for name, t in tensors.items()}, allowed)


def same_run(one: nn.Module, other: nn.Module, *inputs: torch.Tensor) -> None:
    """Both give the same bits, forward and backward."""
    for module in (one, other):
        module.zero_grad()
    outputs = [module(*copy.deepcopy(inputs)) for module in (one, other)]
    first = [output[0] if isinstance(output, tuple) else output for output in outputs]
    assert torch.equal(*first)
    for output in first:
        output.pow(2).sum().backward()
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name])
        assert (parameter.grad is None) == (theirs[name].grad is None)
        assert parameter.grad is None or torch.equal(parameter.grad, theirs[name].grad), name
    assert list(one.state_dict()) == list(other.state_dict())


SEQUENCE = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True),
        nn.GRU(8, 6, batch_first=True),
        nn.RNN(8, 6, nonlinearity="relu"),
        nn.LSTM(8, 6, proj_size=3),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=F.gelu),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=nn.SiLU()),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
        nn.Sequential(nn.Conv1d(5, 4, 3, padding_mode="circular"), nn.GroupNorm(2, 4), nn.Softplus(), nn.Flatten()),
        nn.Sequential(nn.Conv1d(5, 4, 3, padding="same"), nn.PReLU(), nn.BatchNorm1d(4), nn.Hardswish()),
    ],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_modules_of_torch(module: nn.Module) -> None:
    back = through(module)
    same_run(module, back, SEQUENCE)
    assert vars(back).keys() == vars(module).keys()


@pytest.mark.parametrize("options", [{}, {"kdim": 8, "vdim": 8}, {"add_bias_kv": True, "batch_first": True}])
def test_attention(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(8, 2, **options)
    same_run(module, through(module), SEQUENCE, SEQUENCE, SEQUENCE)


def test_recurrent_weights_are_the_parameters() -> None:
    back = through(nn.LSTM(4, 4))
    assert all(weight is parameter for weight, parameter in zip(back._flat_weights, back.parameters(), strict=True))
    assert back.double()(torch.randn(2, 1, 4, dtype=torch.float64))[0].dtype is torch.float64


def test_sharing_flags_and_persistence() -> None:
    shared = nn.Linear(3, 3)
    module = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(3, 3))
    module[3].weight = shared.weight
    module[1].eval()
    shared.bias.requires_grad_(False)
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("lost", torch.ones(2, dtype=torch.bool), persistent=False)
    module.register_buffer("none", None)
    module.register_parameter("nothing", None)
    back = through(module)
    assert back[0] is back[2]
    assert back[0].weight is back[3].weight
    assert [m.training for m in back.modules()] == [m.training for m in module.modules()]
    assert not back[0].bias.requires_grad
    assert list(back.state_dict()) == list(module.state_dict())
    assert "lost" in dict(back.named_buffers())
    assert back.nothing is None
    same_run(module, back, torch.randn(2, 3))


def test_a_users_module_with_configuration_and_functions(acme: Any, tmp_path: Path) -> None:
    module = acme.Net(acme.Config(width=5, kind=acme.Kind.POST))
    module.numbers = {"a": (1, 2.5), 3: np.float64(0.1)}
    module.partial = functools.partial(nn.LayerNorm, eps=1e-3)
    assert module.heavy is not None
    (tmp_path / "canary").unlink()
    description, tensors = encode_module(module)
    assert description["required"] == ["acme_nets.blocks"]
    back = decode_module(description, tensors, TRUST)
    assert not (tmp_path / "canary").exists()
    assert (back.config, back.kind, back.size) == (module.config, acme.Kind.POST, acme.Size(1, 2))
    assert (back.args, back.more) == (module.args, module.more)
    assert back.function is acme.act
    assert back.norm is nn.LayerNorm
    assert back.layers[0] is back.first
    assert back.numbers == {"a": (1, 2.5), 3: 0.1}
    assert (back.partial.func, back.partial.keywords) == (nn.LayerNorm, {"eps": 1e-3})
    assert "heavy" not in vars(back)
    same_run(module, back, torch.randn(2, 5))
    with pytest.raises(ShippingError, match="start the worker with --trust acme_nets"):
        decode_module(description, tensors, Allowed())


class Local(nn.Module):
    pass


def with_attribute(value: Any, name: str = "value") -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    setattr(module[1], name, value)
    return module


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module[1].register_forward_hook(lambda *_: None)
    return module


def nonleaf() -> nn.Module:
    return with_attribute(torch.ones(2, requires_grad=True) * 2)


def viewing() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[1].weight = nn.Parameter(module[0].weight.data[:2])
    return module


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: with_attribute(lambda x: x), "module '1' .ReLU., attribute 'value': .*is a lambda.*--trust PACKAGE"),
        (lambda: with_attribute(threading.Lock()), "attribute 'value': a _thread.lock is neither plain data"),
        (lambda: with_attribute(nn.ReLU().forward), "attribute 'value'"),
        (
            lambda: with_attribute(torch.load),
            "attribute 'value': nothing of module 'torch.serialization' can be shipped",
        ),
        (lambda: with_attribute(functools.partial(F.relu, inplace=True)), "carried only over a module class"),
        (lambda: with_attribute(torch.Generator()), "attribute 'value'"),
        (lambda: with_attribute(1, "__secret"), "attribute '__secret': it is not plain data"),
        (lambda: with_attribute(F.gelu, "forward"), "attribute 'forward': it is not plain data"),
        (lambda: with_attribute(1, "extra_repr"), "attribute 'extra_repr': it replaces a method"),
        (hooked, "module '1' .ReLU.: it has forward hooks, which are code"),
        (nonleaf, "attribute 'value': a tensor that was computed from parameters"),
        (viewing, "'..weight' and '..weight' share memory"),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))), "module '0' .*parametrized"),
        (lambda: torch.jit.script(nn.Sequential(nn.ReLU())), "scripted"),
        (lambda: torch.compile(nn.Sequential(nn.ReLU())), "torch._dynamo"),
        (lambda: torch.fx.symbolic_trace(nn.ReLU()), "GraphModule"),
        (lambda: nn.Sequential(type("Net", (nn.Module,), {})()), "another object|has no|inside a function|no 'Net'"),
        (lambda: nn.Sequential(type("Net", (nn.Module,), {"__module__": "__main__"})()), "__main__"),
        (lambda: nn.Linear(2, 2, device="meta"), "attribute 'weight': a tensor on the device 'meta'"),
        (lambda: nn.LazyLinear(2), "UninitializedParameter|lazy module"),
        (lambda: nn.ParameterList([torch.ones(2).to_sparse()]), "only dense tensors"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_carried_is_refused_at_the_callers(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ShippingError, match=words):
        encode_module(make())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nasty", "__setstate__"),
        ("Reduced", "__reduce__"),
        ("Newed", "__new__"),
        ("Slotted", "__slots__"),
        ("Scripted", "torch.jit"),
    ],
)
def test_classes_that_say_themselves_how_they_are_made(acme: Any, tmp_path: Path, name: str, words: str) -> None:
    made = nn.Module.__new__(nn.Module)
    description, tensors = encode_module(nn.Sequential(nn.ReLU()))
    description["modules"][1]["class"] = f"acme_nets.blocks:{name}"
    with pytest.raises(ShippingError, match=words):
        decode_module(description, tensors, TRUST)
    if name not in ("Newed", "Scripted"):
        made = getattr(acme, name)()
        with pytest.raises(ShippingError, match=words):
            encode_module(made)
    assert not (tmp_path / "canary").exists()


def attributes(*items: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["modules"][0].update(attributes=[list(item) for item in items])


def first(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["modules"][0].update(values)


RELU = {"function": "torch.nn.functional.relu"}
HOSTILE: list[Callable[[dict[str, Any]], None]] = [
    attributes(("forward", RELU)),
    attributes(("_call_impl", RELU)),
    attributes(("_compiled_call_impl", RELU)),
    attributes(("__class__", {"class": "torch.nn.modules.linear:Linear"})),
    attributes(("__dict__", {"dict": []})),
    attributes(("_forward_hooks", {"ordered": [[0, RELU]]})),
    attributes(("_forward_pre_hooks", {"ordered": [[0, RELU]]})),
    attributes(("_my_hooks", {"ordered": []})),
    attributes(("_parameters", {"dict": []})),
    attributes(("training", 1)),
    attributes(("extra_repr", RELU)),
    attributes(("train", RELU)),
    attributes(("a", 1), ("a", 2)),
    attributes((1, 1)),
    attributes(("a",)),
    attributes(("a", {"function": "torch.load"})),
    attributes(("a", {"function": "torch:load"})),
    attributes(("a", {"function": "builtins:eval"})),
    attributes(("a", {"function": "os:system"})),
    attributes(("a", {"function": "acme_nets.__main__:x"})),
    attributes(("a", {"class": "subprocess:Popen"})),
    attributes(("a", {"partial": ["os:system", []]})),
    attributes(("a", {"partial": ["torch.nn.modules.linear:Linear", [["__x", 1]]]})),
    attributes(("a", {"object": ["acme_nets.blocks:Plain", []]})),
    attributes(("a", {"object": ["acme_nets.blocks:Kind", []]})),
    attributes(("a", {"object": ["acme_nets.blocks:Config", [["__class__", 1]]]})),
    attributes(("a", {"object": ["types:SimpleNamespace", [["__dict__", {"dict": []}]]]})),
    attributes(("a", {"object": ["types:FunctionType", []]})),
    attributes(("a", {"enum": ["acme_nets.blocks:Kind", "__class__"]})),
    attributes(("a", {"named": ["acme_nets.blocks:Size", [1]]})),
    attributes(("a", {"tensor": "nope"})),
    attributes(("a", {"module": 99})),
    attributes(("a", {"module": -1})),
    attributes(("a", {"reduce": ["os:system", ["true"]]})),
    first(modules=[["0", 0]]),
    first(modules=[["0", 1], ["1", 99]]),
    first(modules=[["a.b", 1]]),
    first(modules=[["", 1]]),
    first(modules=[["0", True]]),
    first(parameters=[["w", "1.missing"]]),
    first(parameters=[["", "0.weight"]]),
    first(buffers=[["w", "0.weight", True]]),
    first(buffers=[["w", None, 1]]),
    first(training=1),
    first(surprise=1),
    first(**{"class": "torch.jit._script:ScriptModule"}),
    first(**{"class": "torch.nn.modules.rnn:LSTM"}),
    lambda d: d.update(surprise=1),
    lambda d: d.update(modules=[]),
    lambda d: d.update(modules={}),
    lambda d: d["tensors"].clear(),
    lambda d: d["tensors"]["0.weight"].update(shape=[2, 2, 2**70]),
    lambda d: d["tensors"]["0.weight"].update(dtype="int64"),
    lambda d: d["tensors"]["0.weight"].update(parameter=False),
    lambda d: d["tensors"]["0.weight"].update(extra=1),
]


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_descriptions(acme: Any, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    description, tensors = encode_module(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    description = load(dump(description))
    change(description)
    with pytest.raises(ShippingError):
        decode_module(description, tensors, TRUST)
    assert not (tmp_path / "canary").exists()


def test_an_integer_tensor_cannot_require_a_gradient() -> None:
    description, tensors = encode_module(nn.BatchNorm1d(2))
    description["tensors"]["num_batches_tracked"]["requires_grad"] = True
    with pytest.raises(ShippingError, match="int64 cannot require a gradient"):
        decode_module(description, tensors, TRUST)


def test_depth_and_cycles_of_modules() -> None:
    module: nn.Module = nn.ReLU()
    for _ in range(70):
        module = nn.Sequential(module)
    with pytest.raises(ShippingError, match="nested deeper than 64"):
        encode_module(module)
    description, tensors = encode_module(nn.Sequential(nn.Sequential(nn.ReLU())))
    description["modules"][1]["modules"] = [["0", 0]]
    with pytest.raises(ShippingError, match="contain themselves"):
        decode_module(description, tensors, TRUST)
    entry = {**description["modules"][0], "attributes": []}
    wide = [{**entry, "modules": [[str(i), n + 1] for i in range(2)] if n < 60 else []} for n in range(61)]
    assert len(list(decode_module({**description, "modules": wide}, tensors, TRUST).children())) == 1
    deep = [{**entry, "modules": [["0", n + 1]] if n < 99 else []} for n in range(100)]
    with pytest.raises(ShippingError, match="nested deeper than 64"):
        decode_module({**description, "modules": deep}, tensors, TRUST)


def test_too_many_modules() -> None:
    description, tensors = encode_module(nn.ReLU())
    description["modules"] = description["modules"] * 100_001
    with pytest.raises(ShippingError, match="the limit is 100000"):
        decode_module(description, tensors, TRUST)


CONFIG = """
class PretrainedConfig:
    pass
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stands for transformers, which is not installed here: only the names matter."""
    import importlib

    folder = tmp_path / "transformers"
    (folder / "models" / "tiny").mkdir(parents=True)
    for place in (folder, folder / "models", folder / "models" / "tiny"):
        (place / "__init__.py").write_text("")
    (folder / "configuration_utils.py").write_text(CONFIG)
    (folder / "models" / "tiny" / "configuration_tiny.py").write_text(
        "from transformers.configuration_utils import PretrainedConfig\nclass TinyConfig(PretrainedConfig):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "transformers"}
    yield importlib.import_module("transformers.models.tiny.configuration_tiny")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        del sys.modules[name]
    sys.modules.update(hidden)


def test_configurations_of_transformers(hub: Any) -> None:
    config = hub.TinyConfig()
    vars(config).update(
        hidden_size=8, _attn_implementation="sdpa", auto_map={"AutoModel": "evil.Model"}, _name_or_path="a/b"
    )
    module = nn.ReLU()
    module.config = config
    back = through(module, Allowed())
    assert vars(back.config) == {"hidden_size": 8, "_attn_implementation": "sdpa"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_attn_implementation", "someone/kernel"),
        ("_attn_implementation_internal", "flash_attention_2"),
        ("auto_map", {"dict": [["AutoModel", "evil.Model"]]}),
        ("trust_remote_code", True),
        ("quantization_config", {"dict": []}),
    ],
)
def test_configurations_that_fetch_code(hub: Any, name: str, value: Any) -> None:
    description, tensors = encode_module(nn.ReLU())
    config = {"object": ["transformers.models.tiny.configuration_tiny:TinyConfig", [[name, value]]]}
    description["modules"][0]["attributes"] = [["config", config]]
    with pytest.raises(ShippingError, match=f"configuration TinyConfig: .*{name.strip('_')[:5]}|quantized"):
        decode_module(description, tensors, Allowed())

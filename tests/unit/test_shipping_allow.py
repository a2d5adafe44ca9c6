"""The allow-list: what it holds, what it refuses, and that a change of it is seen."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from torchslicer.cluster.shipping import functions
from torchslicer.cluster.shipping.allow import Allowed, Importable, untrusted
from torchslicer.cluster.shipping.names import name_of, split_name
from torchslicer.errors import ShippingError

GOLDEN = Path(__file__).parents[1] / "golden" / "allowed_functions.txt"


def everything() -> str:
    """Everything that a graph may call, a name a line; the first line is the version of torch."""
    lines = [f"torch {torch.__version__.split('+')[0]}"]
    lines += functions.table()
    lines += sorted(functions.operators())
    lines += sorted(functions._TORCHVISION)
    lines += [f"Tensor.{name}" for name in sorted(functions.methods())]
    return "\n".join(lines) + "\n"


def test_the_list_is_the_one_that_was_reviewed() -> None:
    """Written anew by: python -c 'from tests.unit.test_shipping_allow import *; GOLDEN.write_text(everything())'."""
    expected = GOLDEN.read_text()
    if expected.splitlines()[0] != everything().splitlines()[0]:
        pytest.skip(f"the list was reviewed for {expected.splitlines()[0]}")
    assert without_math(everything()) == without_math(expected)


def without_math(names: str) -> list[str]:
    """Leave out what differs between releases of Python; all of it is arithmetic."""
    return [name for name in names.splitlines() if not name.startswith("math.")]


WORDS = ("load", "save", "hub", "compile", "jit", "package", "file", "seed", "numpy", "eval", "exec", "import", "open")


@pytest.mark.parametrize("word", WORDS)
def test_no_name_of_the_list_holds(word: str) -> None:
    names = {name.rpartition(".")[2] for name in functions.table()} | functions.methods()
    assert [name for name in names if word in name.split("_")] == []


def test_every_function_of_the_list_is_found_and_named_again() -> None:
    for name, function in functions.table().items():
        assert functions.listed_function(name) is function
        again = functions.listed_name(function)
        assert again is not None
        assert functions.table()[again] is function
    for name in sorted(functions.operators())[::25]:
        found = functions.listed_function(name)
        assert functions.listed_name(found) in (name, functions.ZEROED.get(name))


@pytest.mark.parametrize("function", [F.relu, torch.relu, operator.add, F.max_pool2d, F.gelu, torch.einsum, getattr])
def test_functions_of_models(function: object) -> None:
    name = functions.listed_name(function)
    assert name is not None
    assert Allowed().function(name) is function


@pytest.mark.parametrize(
    "function", [torch.load, torch.save, torch.compile, torch.manual_seed, eval, exec, open, torch.vmap]
)
def test_functions_off_the_list(function: object) -> None:
    assert functions.listed_name(function) is None


def test_torchvision_functions_are_found_by_exact_name() -> None:
    found = Allowed().function("torchvision.ops.stochastic_depth.stochastic_depth")
    assert functions.listed_name(found) == "torchvision.ops.stochastic_depth.stochastic_depth"
    with pytest.raises(ShippingError):
        Allowed().function("torchvision.ops.boxes.nms")


CLASSES = [
    "torch.fx.graph_module:GraphModule",
    "torch.jit._script:ScriptModule",
    "torch.nn.parallel.distributed:DistributedDataParallel",
    "torch.distributed.nn.api.remote_module:RemoteModule",
    "torch.ao.nn.quantized.modules.linear:Linear",
    "torchvision.models.quantization.resnet:QuantizableResNet",
    "torch.nn.utils.parametrize:ParametrizationList",
    "torch.nn.modules.lazy:LazyModuleMixin",
    "torch.nn.modules.linear:LazyLinear",
    "torch.nn.modules.linear:Linear.forward",
    "torch.nn.modules.linear:init",
    "torch.nn.modules.linear:math",
    "torch.nn.modules.linear:F",
    "torch.nn:Linear",
    "torchvision.models.resnet:partial",
    "torchvision.models._api:WeightsEnum",
    "builtins:object",
    "subprocess:Popen",
    "torch.nn.modules.linear:Module",
    "torch.nn.modules.linear:Nope",
    "torch.nn.modules.nope:Nope",
    "__main__:Net",
    "torch.nn.modules.linear:__builtins__",
    "torch.nn.modules.linear:Linear.__init__",
    "torch.package.package_importer:X",
    "torch.nn.modules.linear",
    "torch.nn.modules.linear:",
    "",
    3,
    None,
    "a" * 10_000 + ":b",
    "torch.nn.modules.linear:Linear\n",
]


@pytest.mark.parametrize("name", CLASSES)
def test_classes_off_the_list(name: object) -> None:
    with pytest.raises(ShippingError):
        Allowed().module_class(name)


def test_a_class_off_the_list_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "nasty_package.py").write_text(f"open({str(canary)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    for look in (Allowed().module_class, Allowed().data_class, Allowed().function, Allowed().factory):
        with pytest.raises(ShippingError, match="start the worker with --trust nasty_package to accept it"):
            look("nasty_package:Thing")
    with pytest.raises(ShippingError, match="not among the builders"):
        Allowed(["nasty_package"]).builder("nasty_package:make")
    assert not canary.exists()


@pytest.mark.parametrize(
    "package", ["os", "torch", "torch.nn", "builtins", "subprocess", "torchslicer", "a-b", "", "*", "__main__"]
)
def test_packages_that_nobody_can_trust(package: str) -> None:
    with pytest.raises(ShippingError, match="expected the name of your own package"):
        Allowed([package])


def test_trust_is_by_whole_parts_of_names() -> None:
    allowed = Allowed(["tests.support"])
    assert allowed.module_class("tests.support.models:GPT").__name__ == "GPT"
    assert (allowed.trusts("tests.support"), allowed.trusts("tests.supporters"), allowed.trusts("tests")) == (
        True,
        False,
        False,
    )
    assert untrusted(["tests.support.models", "tests.unit"], ["tests.support"]) == ("tests.unit",)
    with pytest.raises(ShippingError, match="only another name"):
        allowed.module_class("tests.support.models:nn.Linear")
    with pytest.raises(ShippingError, match="is not on this worker's list"):
        allowed.module_class("tests.unit.test_shipping_allow:Net")


def test_modules_imported_by_a_trusted_module_are_not_trusted() -> None:
    allowed = Allowed(["tests.support"])
    for name in ("tests.support.models:torch.load", "tests.support.models:nn.Linear", "tests.support.tvshim:Path"):
        with pytest.raises(ShippingError):
            allowed.function(name)


def test_the_callers_side_says_what_workers_must_trust() -> None:
    from tests.support import models

    allowed = Importable()
    assert allowed.name_of_module_class(models.GPT) == "tests.support.models:GPT"
    assert allowed.name_of_function(models.pack_moe) == "tests.support.models:pack_moe"
    assert allowed.name_of_function(F.relu) == "torch.nn.functional.relu"
    assert allowed.required == {"tests.support.models"}
    with pytest.raises(ShippingError, match="no worker accepts anything of module 'shutil'"):
        allowed.name_of_function(__import__("shutil").rmtree)


def test_names() -> None:
    def local() -> None: ...

    with pytest.raises(ShippingError, match="is defined inside a function"):
        name_of(local)
    with pytest.raises(ShippingError, match="is a lambda"):
        name_of(lambda: 0)
    main = type("Net", (), {"__module__": "__main__"})
    with pytest.raises(ShippingError, match="is defined in the script that was started"):
        name_of(main)
    with pytest.raises(ShippingError, match="is another object than the one used"):
        name_of(type("Path", (), {"__module__": "pathlib"}))
    with pytest.raises(ShippingError, match="a list has no name"):
        name_of([])
    with pytest.raises(ShippingError, match="expected a name such as"):
        split_name("a:b:c")

"""Promise P5: nothing in the package reads pickles or runs text as code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "torchslicer"
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("torch", "load"),
    ("yaml", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "unsafe_load"),
    ("hub", "load"),
}


def offences(source: str) -> Iterator[str]:
    """What the code of *source* uses of the forbidden; comments, texts and methods (``model.eval()``) are free."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{a.name}" for a in names if (module.split(".")[-1], a.name) in METHODS)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS | MODULES:
                yield name
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if (
                owner,
                name,
            ) in METHODS:
                yield f"{owner}.{name}"
            case ast.Attribute(value=ast.Name(id=("builtins")), attr=name) if name in CALLS:
                yield f"builtins.{name}"
            case ast.Name(id=name) if name in MODULES | {"eval", "exec"}:
                yield name


def test_the_package_is_free_of_it() -> None:
    found = {str(path): sorted(offences(path.read_text())) for path in sorted(SOURCES.rglob("*.py"))}
    assert len(found) > 20
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "exec('1')",
        "f = eval",
        "from torch import load",
        "import yaml\nyaml.load('x')",
        "import builtins\nbuiltins.eval('1')",
        "compile('1', '', 'eval')",
        "__import__('os')",
        "import cloudpickle",
        "import marshal",
        "torch.hub.load('x')",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "'pickle.load'",
        "# torch.load",
        "def f():\n    '''eval(x)'''",
        "re.compile('x')",
        "yaml.safe_load('x')",
    ],
)
def test_the_check_leaves_alone(source: str) -> None:
    assert not list(offences(source))

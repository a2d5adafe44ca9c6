from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import torchslicer

ROOT = Path(__file__).parents[2]
PUBLIC_API = ROOT / "tests" / "golden" / "public_api.txt"

IMPORT_WITHOUT_TORCH = """
import importlib.abc, sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, sys.argv[1])
import torchslicer
"""

TRAIN_WITHOUT_POSIX = """
import os, socket, sys

for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
for module, names in ((os, "sched_getaffinity geteuid fork"), (socket, "AF_UNIX SO_PEERCRED MSG_DONTWAIT MSG_WAITALL")):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
import torch
import torchslicer

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
x = torch.randn(8, 4)
[epoch] = torchslicer.slice(model, n=2).train([(x, x[:, :2])], "sgd", "mse", epochs=1, run_dir=False)
print(epoch["samples"])
"""

IMPORT_IN_USE = """
import sys
sys.path.insert(0, sys.argv[1])
import torchslicer
print(*sorted(name for name in sys.argv[2:] if name in sys.modules))
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(ROOT / "src"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (path,) = folder.glob("torchslicer-*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def read_metadata(wheel: zipfile.ZipFile) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return wheel.read(name).decode()


def test_without_torch_one_error_says_how_to_get_it():
    done = run_python(IMPORT_WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1  # no chain of errors behind it
    last = done.stderr.split("\nImportError: ")
    assert len(last) == 2, done.stderr
    assert "pip install torch" in last[1]


def test_import_loads_nothing_optional():
    done = run_python(IMPORT_IN_USE, "sklearn", "grpc", "cryptography", "torchvision", "transformers", "opentelemetry")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_version_is_the_one_of_the_project(project):
    assert torchslicer.__version__ == project["version"]


def test_changelog_has_a_place_for_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_torch_is_not_a_dependency(project):
    declared = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in declared}
    assert not {name for name in names if name.startswith("torch")} - {"torchslicer"}


def test_wheel_holds_the_typed_package_and_nothing_else(wheel):
    names = wheel.namelist()
    assert "torchslicer/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"torchslicer", f"torchslicer-{torchslicer.__version__}.dist-info"}


def test_wheel_holds_every_module_of_the_source(wheel):
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in wheel.namelist() if name.endswith(".py")} == sources


def test_wheel_metadata(wheel):
    metadata = read_metadata(wheel)
    assert "License-Expression: GPL-3.0-or-later" in metadata
    assert "License-File: LICENSE" in metadata
    assert not re.search(r"^Requires-Dist: torch\b", metadata, flags=re.MULTILINE)


def test_public_names_are_pinned():
    pinned = PUBLIC_API.read_text(encoding="utf-8").split()
    assert pinned == sorted(pinned)
    assert sorted(torchslicer.__all__) == pinned, (
        "a change of the public names belongs in the changelog and in this list"
    )


@pytest.mark.parametrize("name", PUBLIC_API.read_text(encoding="utf-8").split())
def test_public_name_exists(name):
    assert hasattr(torchslicer, name)


def test_local_training_needs_nothing_that_windows_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_WITHOUT_POSIX], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "8", done.stderr

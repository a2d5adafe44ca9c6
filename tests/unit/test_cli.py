from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

import torchslicer
from torchslicer import Plan
from torchslicer.cli import main
from torchslicer.cli.digits import Digits, Loader, ResidualDigits, largest_difference, train_unsliced
from torchslicer.cli.reference import build_model, example_inputs
from torchslicer.errors import StageError, UserError
from torchslicer.schedule import Schedule, generate

MODULE = "cli_test_models"
SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.third(torch.relu(self.second(self.first(x))) + x)

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, ids, scale):
        return self.head(self.embed(ids) * scale)

class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def fails():
    raise RuntimeError("no weights here")

ready = Net()
number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module of models in it."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "cli_test_broken.py").write_text("import a_module_that_is_not_there\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in (MODULE, "cli_test_broken"):
        sys.modules.pop(name, None)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: object, code: int = 2) -> str:
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("torchslicer: ")
    return result.stderr


def test_version() -> None:
    assert call("--version").output == f"torchslicer {torchslicer.__version__} (PyTorch {torch.__version__})\n"


def test_help_lists_the_commands() -> None:
    output = call("--help").output
    assert [name for name in ("demo", "plan", "schedule") if f"  {name} " in output] == ["demo", "plan", "schedule"]


# ---------------------------------------------------------------------------------------------------------------- plan
@pytest.mark.parametrize("builder", ["Net", "ready"])
def test_plan_prints_the_table(folder: Path, builder: str) -> None:
    result = call("plan", f"{MODULE}:{builder}", "-n", 3)
    assert result.exit_code == 0, result.output
    assert "3 stages by 'uniform', graph from fx" in result.stdout
    assert "third" in result.stdout


def test_plan_goes_through_json(folder: Path) -> None:
    result = call("plan", f"{MODULE}:Net", "-n", 2, "--json")
    plan = Plan.from_json(result.stdout)
    assert plan.num_stages == 2
    assert plan.to_json() == result.stdout.rstrip("\n")


def test_plan_cuts_where_it_is_told(folder: Path) -> None:
    plan = Plan.from_json(call("plan", f"{MODULE}:Net", "--cuts", "second, third", "--json").stdout)
    assert [stage.units[0] for stage in plan.stages] == ["first", "second", "third"]


def test_plan_measures_with_an_example(folder: Path) -> None:
    result = call("plan", f"{MODULE}:Net", "-n", 2, "--strategy", "time", "--example", "2,4", "--json")
    plan = Plan.from_json(result.stdout)
    assert sum(stage.time_share or 0.0 for stage in plan.stages) == pytest.approx(1.0)
    assert {value.size_bytes for value in plan.boundaries} == {2 * 4 * 4}


def test_plan_takes_several_examples(folder: Path) -> None:
    result = call("plan", f"{MODULE}:Tokens", "--example", "2,3:int64", "--example", "1")
    assert result.exit_code == 0, result.output


def test_the_search_path_is_as_before(folder: Path) -> None:
    before = list(sys.path)
    call("plan", f"{MODULE}:Net")
    assert sys.path == before


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (MODULE, "expected package.module:builder"),
        (":Net", "expected package.module:builder"),
        (f".{MODULE}:Net", "expected package.module:builder"),
        ("cli_test_model:Net", "there is no module 'cli_test_model'"),
        ("cli_test_broken:Net", "importing 'cli_test_broken' failed: ModuleNotFoundError: No module named 'a_module"),
        (f"{MODULE}:Nett", "there is no 'Nett' in cli_test_models; did you mean 'Net'?"),
        (f"{MODULE}:number", "found int"),
        (f"{MODULE}:fails", "failed: RuntimeError: no weights here"),
        ("builtins:dict", "expected it to return a torch.nn.Module, got dict"),
    ],
)
def test_a_wrong_reference_is_explained(folder: Path, reference: str, text: str) -> None:
    assert text in refused("plan", reference)


def test_a_model_that_cannot_be_cut_has_an_exit_code_of_its_own(folder: Path) -> None:
    assert "20 non-empty stages" in refused("plan", f"{MODULE}:Net", "-n", 20, code=3)


@pytest.mark.parametrize("spec", ["4,x", "", "4,", "-1,2", "4,8:", "4;8"])
def test_a_wrong_example_is_explained(spec: str) -> None:
    with pytest.raises(UserError, match="expected sizes"):
        example_inputs([spec])


def test_an_unknown_dtype_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'float32'"):
        example_inputs(["4,8:flot32"])


def test_examples_are_inputs() -> None:
    one = example_inputs(["2,3:bfloat16"])
    assert (one.shape, one.dtype) == ((2, 3), torch.bfloat16)
    first, second = example_inputs(["2,3", "2:int64"])
    assert torch.equal(first, example_inputs(["2,3"]))
    assert second.tolist() == [0, 0]
    assert example_inputs([]) is None


def test_a_reference_may_lead_into_a_class() -> None:
    assert isinstance(build_model("torch:nn.Identity"), torch.nn.Identity)


# ------------------------------------------------------------------------------------------------------------ schedule
def test_schedule_is_drawn_with_its_facts() -> None:
    assert call("schedule", "1f1b", "-n", 3, "-m", 4).stdout == (
        "1f1b: 3 stages, 4 micro-batches, bubble 33.3% (idle slots / all slots)\n"
        "rank 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3\n"
        "rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .\n"
        "rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .\n"
        "peak in flight, stage by stage: 3, 2, 1 micro-batches\n"
    )


def test_schedule_as_lists_can_be_read_back() -> None:
    assert Schedule.parse(call("schedule", "gpipe", "-n", 2, "-m", 3, "--csv").stdout) == generate("gpipe", 2, 3)


def test_plain_is_one_micro_batch() -> None:
    assert "1 micro-batch," in call("schedule", "plain", "-n", 2).stdout


def test_schedule_writes_an_svg(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    result = call("schedule", "gpipe", "--svg", path)
    assert result.stderr == f"wrote {path}\n"
    assert ET.parse(path).getroot().tag.endswith("svg")


def test_schedule_refuses() -> None:
    assert "did you mean 'gpipe'" in refused("schedule", "gpip")
    assert "at least 1, got 0" in refused("schedule", "gpipe", "-m", 0)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = call("schedule", "gpipe", "--svg", tmp_path / "nowhere" / "x.svg")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "No such file" in result.stderr


# -------------------------------------------------------------------------------------------------------------- errors
def test_debug_shows_the_traceback() -> None:
    assert isinstance(call("--debug", "schedule", "gpip").exception, torchslicer.ScheduleError)


def test_the_exit_code_is_that_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def breaks() -> None:
        raise StageError("stage 1 of 2: out of memory")

    monkeypatch.setitem(main.commands, "breaks", breaks)
    assert refused("breaks", code=11) == "torchslicer: stage 1 of 2: out of memory\n"


# ---------------------------------------------------------------------------------------------------------------- demo
def test_demo_says_how_to_get_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert "pip install 'torchslicer[demo]'" in refused("demo")


def test_demo_refuses_contradictions() -> None:
    assert "leave one out" in refused("demo", "--schedule", "plain", "--microbatches", 4)
    assert "epochs" in refused("demo", "--epochs", 0)


def test_the_demo_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    refused("demo", "--epochs", 0)
    assert torch.get_num_threads() == before


def test_the_demo_shuffles_the_same_way_each_time() -> None:
    digits = Digits(torch.zeros(10, 1, 8, 8), torch.arange(10))
    first, second = (Loader(digits, 4, seed=3) for _ in range(2))
    orders = [[labels.tolist() for _, labels in loader] for loader in (first, first, second, second)]
    assert orders[:2] == orders[2:]
    assert orders[0] != orders[1]
    assert [len(piece) for piece in orders[0]] == [4, 4, 2]
    assert len(first) == 3


def test_the_demos_reference_is_the_sliced_training() -> None:
    generator = torch.Generator().manual_seed(0)
    digits = Digits(torch.randn(10, 1, 8, 8, generator=generator), torch.arange(10))
    torch.manual_seed(0)
    whole = ResidualDigits(4)
    model = ResidualDigits(4)
    model.load_state_dict(whole.state_dict())
    train_unsliced(whole, Loader(digits, 7, seed=1), epochs=2, num_microbatches=2)
    assert largest_difference(whole, model) > 0.01
    sliced = torchslicer.slice(model, n=3)
    with pytest.warns(UserWarning, match="BatchNorm"):
        sliced.train(
            Loader(digits, 7, seed=1),
            {"name": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}},
            "cross_entropy",
            scheduler={"name": "CosineAnnealingLR", "params": {"T_max": 2}},
            epochs=2,
            n_micro_batches=2,
            run_dir=False,
        )
    assert largest_difference(whole, model) == 0.0


def test_some_value_of_the_demos_model_crosses_several_cuts() -> None:
    plan = torchslicer.slice(ResidualDigits(), n=3).plan
    assert any(value.producer == 0 and 2 in value.consumers for value in plan.boundaries)

"""SCENARIOS section 12: settings and logs, through the calls that users make."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import torchslicer as ts
from tests.support.driver import sliced_train, train_case
from tests.support.models import MLP, mlp4
from tests.support.oracle import SGD, assert_same_bits
from torchslicer.errors import ConfigError, UserError

CRITERION = nn.CrossEntropyLoss()


def yaml_config(folder: Path, text: str) -> ts.RunConfig:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return ts.RunConfig.load(path)


def test_s55_numbers_in_yaml_are_numbers(tmp_path: Path) -> None:
    """`1e-4` is a string for YAML 1.1; `"false"` is true for Python."""
    config = yaml_config(
        tmp_path,
        "training:\n  epochs: '3'\n  mixed_precision: 'false'\n"
        "  optimizer: {name: AdamW, params: {lr: 1e-4, weight_decay: 5e-4}}\n",
    )
    assert config.training.optimizer["params"] == {"lr": 0.0001, "weight_decay": 0.0005}
    assert config.training.epochs == 3
    assert config.training.mixed_precision is False


def test_s55_a_wrong_type_names_key_value_and_expectation(tmp_path: Path) -> None:
    """`epochs: many` is an error with the key and the value."""
    with pytest.raises(ConfigError, match=r"(?s)epochs.*many"):
        yaml_config(tmp_path, "training:\n  epochs: many\n")


def test_s55_a_yaml_file_drives_training(tmp_path: Path) -> None:
    """The run configuration gives the optimizer, the loss, the epochs and the micro-batches."""
    config = yaml_config(
        tmp_path,
        "training:\n  epochs: 2\n  optimizer: {name: SGD, params: {lr: 5e-2, momentum: 0.9}}\n"
        "  criterion: {name: CrossEntropyLoss}\npipeline: {use_gpipe: true, n_micro: 4}\nlogging: {enabled: false}\n",
    )
    expected = train_case(MLP, SGD, n=2, steps=3, epochs=2, n_micro_batches=4)
    result = sliced_train(MLP.model(), MLP.batches(3), None, None, n=2, run_config=config, epochs=None)
    assert_same_bits(result, expected)
    assert len(result.history) == 2


def test_s56_an_unknown_section_names_the_nearest(tmp_path: Path) -> None:
    """`pipelne` was skipped in silence."""
    with pytest.raises(ConfigError, match="pipeline"):
        yaml_config(tmp_path, "pipelne: {use_gpipe: true}\n")


@pytest.mark.parametrize(
    "options",
    [
        {"n_micro_batches": 0},
        {"n_micro_batches": -1},
        {"epochs": 0},
        {"epochs": -1},
        {"schedule": "gpip"},
        {"recompute": "sometimes"},
        {"batch_norm": "sync"},
        {"use_gpipe": True, "schedule": "1f1b"},
        {"n_micro_batches": 2, "num_microbatches": 4},
    ],
    ids=str,
)
def test_s56_impossible_and_contradictory_options_are_refused(options: dict[str, Any]) -> None:
    """Before training, with the name of the option."""
    with pytest.raises(UserError) as caught:
        train_case(MLP, SGD, n=2, steps=1, **options)
    names = [name for name in options if name in str(caught.value)]
    assert names or "micro" in str(caught.value)


def test_s56_an_unknown_schedule_names_the_known_ones() -> None:
    """A misspelt schedule: the nearest name is given."""
    with pytest.raises(UserError, match="gpipe"):
        train_case(MLP, SGD, n=2, steps=1, schedule="gpip")


def test_s56_an_unknown_strategy_names_the_nearest() -> None:
    """A misspelt strategy at slice."""
    with pytest.raises(ValueError, match="uniform"):
        ts.slice(mlp4(), n=2, strategy="unifrom")


def test_s56_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyword before YAML before environment before default; the keywords of train() come first of all."""
    monkeypatch.setenv("TORCHSLICER_TRAINING__EPOCHS", "5")
    assert ts.RunConfig.from_env().training.epochs == 5
    config = yaml_config(tmp_path, "training: {epochs: 3}\nlogging: {enabled: false}\n")
    assert config.training.epochs == 3
    assert ts.RunConfig.load(tmp_path / "run.yaml", epochs=2).training.epochs == 2
    result = sliced_train(mlp4(), MLP.batches(1), SGD, CRITERION, run_config=config, epochs=4)
    assert len(result.history) == 4


def test_s56_cuda_without_cuda_is_refused() -> None:
    """A device that is not there is refused at slice, by name."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="cuda"):
        ts.slice(mlp4(), n=2, devices=["cuda:0", "cpu"])


def test_s56_the_resolved_configuration_is_saved(tmp_path: Path) -> None:
    """What a run really used is in its folder, and loads again."""
    config = ts.RunConfig.create(run_id="first", epochs=2)
    sliced_train(mlp4(), MLP.batches(2), SGD, CRITERION, run_config=config, epochs=None, run_dir=tmp_path)
    folder = next(path.parent for path in tmp_path.rglob("resolved_config.yaml"))
    assert ts.RunConfig.from_yaml(folder / "resolved_config.yaml").training.epochs == 2
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sum(record["type"] == "step" for record in records) == 4
    assert sum(record["type"] == "epoch" for record in records) == 2


def test_s57_one_line_per_event_under_one_logger(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Lines came twice, or not at all: one namespace, no handler on the root logger, nothing printed."""
    handlers = list(logging.getLogger().handlers)
    caplog.set_level(logging.DEBUG)
    sliced_train(mlp4(), MLP.batches(2), SGD, CRITERION, epochs=2, run_dir=tmp_path)
    ours = [record for record in caplog.records if record.name.startswith("torchslicer")]
    assert not [record for record in caplog.records if record.name == "root"]
    lines = [(record.name, record.getMessage()) for record in ours]
    assert len(lines) == len(set(lines))
    assert logging.getLogger().handlers == handlers
    assert capsys.readouterr().out == ""


def test_s57_a_quiet_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Without verbose nothing is written to the terminal."""
    sliced_train(mlp4(), MLP.batches(2), SGD, CRITERION)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_s57_verbose_shows_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """With verbose the loss is visible."""
    sliced_train(mlp4(), MLP.batches(2), SGD, CRITERION, verbose=True)
    captured = capsys.readouterr()
    assert "loss" in captured.out + captured.err


def test_the_public_names_of_the_first_page_are_there() -> None:
    """What documentation shows can be imported from the top."""
    for name in (
        "slice", "SlicedModel", "RunConfig", "TrainingCallback", "BlockStage", "GPT2EmbedStage", "SimpleEmbedStage",
        "CausalLMHeadStage", "AuxInputStage", "MoEBlockStage", "register_strategy", "add_aux_loss",
    ):  # fmt: skip
        assert hasattr(ts, name), name

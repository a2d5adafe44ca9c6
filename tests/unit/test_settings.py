"""What is passed to `train` over the configuration over the defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchslicer as ts
from torchslicer.errors import ConfigError, DataError
from torchslicer.settings import TrainSettings, build_options, resolve_config, schedule_of


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("gpipe", 1)),
        ({"num_microbatches": 4}, ("gpipe", 4)),
        ({"n_micro_batches": 4}, ("gpipe", 4)),
        ({"n_micro_batches": 4, "num_microbatches": 4}, ("gpipe", 4)),
        ({"use_gpipe": True, "n_micro_batches": 3}, ("gpipe", 3)),
        ({"schedule": "1f1b", "num_microbatches": 5}, ("1f1b", 5)),
        ({"use_gpipe": True, "schedule": "gpipe", "num_microbatches": 2}, ("gpipe", 2)),
        ({"use_gpipe": False}, ("gpipe", 1)),
        ({"use_gpipe": False, "num_microbatches": 1}, ("gpipe", 1)),
        ({"num_microbatches": "6"}, ("gpipe", 6)),
    ],
)
def test_schedule_and_number_of_micro_batches(settings: dict[str, Any], expected: tuple[str, int]) -> None:
    assert schedule_of(resolve_config(TrainSettings(**settings), None)) == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_gpipe": True, "schedule": "1f1b"}, "use_gpipe=True contradicts schedule='1f1b'"),
        ({"use_gpipe": False, "num_microbatches": 4}, "use_gpipe=False contradicts 4 micro-batches"),
        ({"n_micro_batches": 2, "num_microbatches": 4}, "n_micro_batches=2 contradicts num_microbatches=4"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_config(TrainSettings(**settings), None)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_microbatches": 0}, "num_microbatches: expected greater than or equal to 1, got 0"),
        ({"num_microbatches": 1.5}, "num_microbatches: expected a valid integer"),
        ({"num_microbatches": True}, "num_microbatches: expected a number, got True"),
        ({"n_micro_batches": -1}, "n_micro_batches: expected greater than or equal to 1, got -1"),
        ({"n_micro_batches": "four", "use_gpipe": True}, "n_micro_batches: expected a valid integer"),
        ({"n_micro_batches": 0, "num_microbatches": 0}, "num_microbatches: expected"),
        ({"schedule": 5}, "schedule: expected a valid string, got 5"),
        ({"use_gpipe": "perhaps"}, "use_gpipe: expected a valid boolean"),
        ({"epochs": 0}, "epochs: expected greater than or equal to 1, got 0"),
        ({"mixed_precision": "perhaps"}, "mixed_precision: expected a valid boolean"),
        ({"max_grad_norm": 0.0}, "max_grad_norm: expected greater than 0, got 0.0"),
        ({"accumulate": 1.5}, "accumulate: expected a valid integer"),
        ({"recompute": "sometimes"}, "recompute: expected 'never', 'except_last' or 'always'"),
        ({"batch_norm": "later"}, "batch_norm: expected 'per_microbatch' or 'deferred'"),
        ({"seed": -1}, "seed: expected greater than or equal to 0, got -1"),
        ({"target_key": 3}, "target_key: expected a valid string, got 3"),
    ],
)
def test_errors_name_the_argument_as_it_was_given(settings: dict[str, Any], says: str) -> None:
    """Not the key of the configuration that it goes to: ``pipeline.n_micro`` is nothing that the user wrote."""
    with pytest.raises(ConfigError, match=f"^{says}"):
        resolve_config(TrainSettings(**settings), None)


@pytest.mark.parametrize("config", [None, ts.RunConfig()])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": {"name": "SGD", "lr": 0.1}}, "optimizer.lr: unknown key; an option of it goes under params"),
        ({"optimizer": {"name": "SGD", "params": {"lr": object()}}}, "optimizer.params.lr: expected plain data"),
        ({"criterion": {"nam": "mse"}}, r"2 settings .*:\n  criterion\.name: .*\n  criterion\.nam: unknown"),
    ],
)
def test_errors_within_an_argument_name_it_too(given: dict[str, Any], says: str, config: ts.RunConfig | None) -> None:
    arguments = {"optimizer": "sgd", "criterion": "mse", **given}
    with pytest.raises(ConfigError, match=f"^{says}"):
        small().train([(torch.ones(1, 2), torch.ones(1, 2))], run_config=config, run_dir=False, **arguments)


def test_use_gpipe_says_what_it_says_in_a_configuration() -> None:
    config = ts.RunConfig()
    config.pipeline.schedule = "1f1b"
    assert schedule_of(resolve_config(TrainSettings(use_gpipe="yes"), config)) == ("gpipe", 4)  # type: ignore[arg-type]
    config.pipeline.schedule, config.pipeline.use_gpipe = None, True
    assert schedule_of(resolve_config(TrainSettings(use_gpipe=0), config)) == ("gpipe", 1)  # type: ignore[arg-type]


def test_arguments_beat_the_configuration_which_is_left_alone() -> None:
    config = ts.RunConfig()
    config.training.epochs = 7
    config.pipeline.use_gpipe = True
    config.pipeline.n_micro = 8
    resolved = resolve_config(TrainSettings(epochs=2, schedule="1f1b"), config)
    assert (resolved.training.epochs, schedule_of(resolved)) == (2, ("1f1b", 8))
    assert (config.training.epochs, schedule_of(config)) == (7, ("gpipe", 8))
    assert resolve_config(TrainSettings(), config).training.epochs == 7


def test_options_carry_what_was_asked_for() -> None:
    settings = TrainSettings(
        num_microbatches=3, schedule="1f1b", accumulate=2, max_grad_norm=0.5, recompute="always", batch_norm="deferred",
        mixed_precision=True, seed=9,
    )  # fmt: skip
    options = build_options(
        resolve_config(settings, None), optimizer="adamw", criterion="mse", scheduler=None, num_stages=2,
        shared_inputs=("mask",),
    )  # fmt: skip
    found = (
        options.schedule, options.num_microbatches, options.accumulate, options.max_grad_norm, options.recompute,
        options.batch_norm, options.mixed_precision, options.seed, options.shared_inputs, options.scheduler,
    )  # fmt: skip
    assert found == ("1f1b", 3, 2, 0.5, "always", "deferred", True, 9, ("mask",), None)


@pytest.mark.parametrize("wrong", [{"optimizer": "adamx"}, {"criterion": "croos"}, {"scheduler": "StepL"}])
def test_unknown_names_are_refused_with_the_nearest(wrong: dict[str, str]) -> None:
    given: dict[str, Any] = {"optimizer": "adam", "criterion": "mse", "scheduler": None, **wrong}
    with pytest.raises(ConfigError, match=r"did you mean|unknown"):
        build_options(resolve_config(TrainSettings(), None), num_stages=2, **given)


def small() -> ts.SlicedModel:
    return ts.slice(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ts.slice(nn.Linear(1, 1), exmaple=1), "slice: unknown keyword 'exmaple'; did you mean 'example'"),
        (lambda: small().train([], "sgd", "mse", epoch=1), "train: unknown keyword 'epoch'; did you mean 'epochs'"),
        (lambda: small().evaluate([], metric="accuracy"), "evaluate: .*did you mean 'metrics'"),
        (lambda: small().predict([], batch=3), "predict: unknown keyword 'batch'. Keywords are loader, concatenate"),
        (lambda: small().gradients((), "mse", microbatches=2), "did you mean 'num_microbatches'"),
        (lambda: small().train([], "sgd", "mse", lr=0.1), 'unknown keyword \'lr\'; .*{"name": "SGD", "params": {"lr"'),
        (lambda: ts.slice(nn.Linear(1, 1), stages=2), "unknown keyword 'stages'; the number of stages is n="),
        (lambda: ts.simulate(nn.Linear(1, 1), [], max_gradnorm=1.0), "simulate: .*did you mean 'max_grad_norm'"),
    ],
)
def test_a_misspelt_keyword_names_the_nearest(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        call()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("function", [ts.slice, ts.SlicedModel.train, ts.SlicedModel.evaluate, ts.simulate])
def test_checked_functions_show_their_own_signature(function: Any) -> None:
    shown = inspect.signature(function)
    assert shown == inspect.signature(function.__wrapped__)
    assert "args" not in shown.parameters
    assert function.__doc__


def test_what_is_missing_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'loader'"):
        small().train()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics": ["acuracy"], "eval_loader": []}, "did you mean 'accuracy'"),
        ({"metrics": ["accuracy"]}, "there is no eval_loader="),
    ],
)
def test_wrong_metrics_are_refused_before_anything_is_trained(options: dict[str, Any], says: str) -> None:
    sliced, batch = small(), (torch.ones(3, 2), torch.zeros(3, dtype=torch.long))
    before = sliced.state_dict()
    with pytest.raises(ConfigError, match=says):
        sliced.train([batch], "sgd", "cross_entropy", epochs=1, run_dir=False, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in sliced.state_dict().items())


@pytest.mark.parametrize("batch", [torch.ones(3, 2), np.ones((3, 2), dtype=np.float32)])
def test_a_tensor_is_no_loader_but_a_batch_of_one(batch: Any) -> None:
    with pytest.raises(DataError, match=r"got (tensor|ndarray) of shape \(3, 2\); .* pass a list of it"):
        small().predict(batch)
    assert small().predict([batch]).shape == (3, 2)

"""Epochs, failures and what is left after them, the run folder."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchslicer as ts
from tests.support.models import MLP
from tests.support.oracle import SGD, Result, assert_same_bits, snapshot
from torchslicer.errors import CallbackError, DataError, NonFiniteLossError, StageError
from torchslicer.runlog import read_metrics
from torchslicer.trainer import _Ahead

Options = dict[str, Any]


def test_what_was_looked_at_ahead_still_comes() -> None:
    steps: list[list[Any]] = [["a"], ["b"], ["c"]]
    ahead, seen = _Ahead(iter(steps)), list[Any]()
    for step in ahead:
        seen.append((step, ahead.peek() if step != ["b"] else "not asked"))
    assert seen == [(["a"], ["b"]), (["b"], "not asked"), (["c"], None)]
    assert ahead.peek() is None


class Breaks(nn.Module):
    """Fails when it is told to."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.isnan().all()) or self.broken:
            raise ArithmeticError("told to")
        return x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
        nn.Dropout(0.5),
        Breaks(),
        nn.Linear(16, 16),
        nn.Dropout(0.5),
        nn.Linear(16, 4),
    )
    model[5].eval()
    return model


def state_around(model: nn.Module) -> Any:
    """Return what a run must give back: hooks, flags, gradients, attributes, the caller's random numbers."""
    return (
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()],
        [m.track_running_stats for m in model.modules() if isinstance(m, nn.BatchNorm1d)],
        [p.requires_grad for p in model.parameters()],
        [p.grad is None for p in model.parameters()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )


class Raises(ts.TrainingCallback):
    """Raises at the second step."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, step: int, metrics: Any) -> None:
        if step == 1:
            raise self.error


def stops(batches: list[Any]) -> Iterator[Any]:
    yield from batches[:2]
    raise OSError("disk gone")


class BreaksIt(ts.TrainingCallback):
    """Breaks the model after the first step."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model

    def on_step_end(self, step: int, metrics: Any) -> None:
        self.model[3].broken = True  # type: ignore[union-attr]


FAILURES: list[tuple[type[BaseException], Callable[[nn.Sequential], Options]]] = [
    (CallbackError, lambda model: {"callbacks": [Raises(ValueError("no"))]}),
    (KeyboardInterrupt, lambda model: {"callbacks": [Raises(KeyboardInterrupt())]}),
    (SystemExit, lambda model: {"callbacks": [Raises(SystemExit(3))]}),
    (OSError, lambda model: {"loader": stops(MLP.batches(3))}),
    (DataError, lambda model: {"loader": [*MLP.batches(1), None]}),
    (StageError, lambda model: {"loader": [*MLP.batches(1), (torch.randn(8, 3), torch.zeros(8).long())]}),
    (StageError, lambda model: {"callbacks": [BreaksIt(model)]}),
    (
        NonFiniteLossError,
        lambda model: {"loader": [*MLP.batches(1), (torch.full((8, 16), torch.nan), torch.zeros(8).long())]},
    ),
]


@pytest.mark.filterwarnings("ignore:.*BatchNorm:UserWarning")
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "per_microbatch"])
@pytest.mark.parametrize(("error", "make"), FAILURES, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_a_failed_run_gives_everything_back_and_a_second_one_works(
    error: type[BaseException], make: Callable[[nn.Sequential], Options], deferred: bool
) -> None:
    model = net()
    sliced = ts.slice(model, n=3)
    options: Options = {"num_microbatches": 2, "batch_norm": "deferred" if deferred else None, "run_dir": False}
    options |= {"loader": MLP.batches(3), "epochs": 1, **make(model)}
    if error is NonFiniteLossError:
        model[3] = nn.Identity()
    before = state_around(model)
    with pytest.raises(error):
        sliced.train(options.pop("loader"), SGD, "cross_entropy", **options)
    for module in model.modules():
        if isinstance(module, Breaks):
            vars(module).pop("broken", None)
    assert state_around(model) == before
    again = sliced.train(MLP.batches(3), SGD, "cross_entropy", epochs=1, run_dir=False, num_microbatches=2)
    assert again[0]["samples"] == 24


def test_a_loss_that_is_not_a_number_leaves_the_parameters_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    before = Result(snapshot(model), [])
    batch = (torch.full((8, 16), torch.nan), torch.zeros(8).long())
    with pytest.raises(NonFiniteLossError, match=r"step 0: the loss is nan; no parameter was updated"):
        ts.slice(model, n=2).train([batch], SGD, "cross_entropy", epochs=1, run_dir=False)
    assert_same_bits(Result(snapshot(model), []), before)


def test_a_failed_run_leaves_the_updates_of_its_finished_steps() -> None:
    model, other = net(), net()
    with pytest.raises(CallbackError):
        ts.slice(model, n=2).train(
            MLP.batches(3), SGD, "cross_entropy", epochs=1, run_dir=False, callbacks=[Raises(ValueError())]
        )
    ts.slice(other, n=3).train(MLP.batches(2), SGD, "cross_entropy", epochs=1, run_dir=False)
    assert_same_bits(Result(snapshot(model), []), Result(snapshot(other), []))


def records(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder)


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    history = ts.slice(net(), n=2).train(
        MLP.batches(2),
        SGD,
        "cross_entropy",
        epochs=2,
        run_dir=tmp_path / "run",
        eval_loader=MLP.batches(1),
        max_grad_norm=1.0,
    )
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "resolved_config.yaml"]
    found = records(folder)
    assert [r["type"] for r in found] == ["run", *(["step"] * 2 + ["epoch", "evaluation"]) * 2, "run"]
    assert (found[0]["status"], found[-1]["status"], found[-1]["steps"]) == ("started", "completed", 4)
    assert [r["step"] for r in found if r["type"] == "step"] == [0, 1, 2, 3]
    assert all(r["grad_norm"] > 0 for r in found if r["type"] == "step")
    assert [r["loss"] for r in found if r["type"] == "epoch"] == [record["loss"] for record in history]
    config = ts.RunConfig.from_yaml(folder / "resolved_config.yaml")
    assert (config.training.epochs, config.training.max_grad_norm, config.run_id) == (2, 1.0, found[0]["run_id"])


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ValueError("no"), "failed", "CallbackError: callback Raises.on_step_end: ValueError: no"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt: "),
    ],
)
def test_the_log_of_a_failed_run_says_why(tmp_path: Path, error: BaseException, status: str, says: str) -> None:
    with pytest.raises((CallbackError, KeyboardInterrupt)):
        ts.slice(net(), n=2).train(
            MLP.batches(3), SGD, "cross_entropy", epochs=1, run_dir=tmp_path, callbacks=[Raises(error)]
        )
    last = records(tmp_path)[-1]
    assert (last["type"], last["status"], last["epochs"], last["error"]) == ("run", status, 0, says)
    assert json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["type"] == "run"


def test_history_adds_up() -> None:
    class Losses(ts.TrainingCallback):
        losses: list[float] = []  # noqa: RUF012 - one run only

        def on_batch_end(self, epoch: int, batch: int, metrics: dict[str, Any]) -> None:
            self.losses.append(metrics["loss"] * metrics["samples"])
            assert batch == len(self.losses) - 1

    batches = [*MLP.batches(2), *MLP.batches(1, size=3, seed=4)]
    [record] = ts.slice(net(), n=2).train(batches, SGD, "cross_entropy", epochs=1, run_dir=False, callbacks=[Losses()])
    assert record["samples"] == 19
    assert record["loss"] == pytest.approx(sum(Losses.losses) / 19, rel=1e-12)
    assert record["samples_per_s"] == pytest.approx(19 / record["duration_s"])
    assert (record["epoch"], record["lr"]) == (1, SGD["params"]["lr"])


def test_an_empty_loader_to_evaluate_on_is_named() -> None:
    with pytest.raises(DataError, match="the loader to evaluate on gave no batch"):
        ts.slice(net(), n=2).train(MLP.batches(1), SGD, "cross_entropy", epochs=1, run_dir=False, eval_loader=[])

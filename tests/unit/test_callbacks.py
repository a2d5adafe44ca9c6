"""Calling the user's hooks."""

from __future__ import annotations

from typing import Any

import pytest

import torchslicer as ts
from torchslicer.callbacks import CallbackList
from torchslicer.errors import CallbackError, ConfigError


class Adds(ts.TrainingCallback):
    """Adds to the record, and changes what it was given."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def on_epoch_begin(self, epoch: int) -> None:
        self.log.append(f"{self.name} {epoch}")

    def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> dict[str, Any] | None:
        seen = sorted(metrics)
        metrics.clear()
        return {self.name: seen}


def test_in_order_and_what_they_return_is_merged() -> None:
    log: list[str] = []
    hooks = CallbackList([Adds("a", log), ts.TrainingCallback(), Adds("b", log)])
    hooks.call("on_epoch_begin", 2)
    assert log == ["a 2", "b 2"]
    assert hooks.epoch_end(1, {"loss": 1.0}) == {"loss": 1.0, "a": ["loss"], "b": ["a", "loss"]}


def test_every_method_does_nothing_by_default() -> None:
    hooks = CallbackList([ts.TrainingCallback()])
    hooks.call("on_train_begin", "id", {})
    hooks.call("on_step_end", 0, {})
    hooks.call("on_batch_end", 1, 0, {})
    hooks.call("on_evaluate", {})
    hooks.call("on_train_end", [])
    assert hooks.epoch_end(1, {"loss": 2.0}) == {"loss": 2.0}


def test_what_a_callback_raises_goes_on_with_its_name() -> None:
    class Wrong(ts.TrainingCallback):
        def on_epoch_end(self, epoch: int, metrics: dict[str, Any]) -> Any:
            return 3.5

    with pytest.raises(CallbackError, match=r"callback Wrong\.on_epoch_end: TypeError") as caught:
        CallbackList([Wrong()]).epoch_end(1, {})
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_interrupt_goes_through_as_it_is() -> None:
    class Stops(ts.TrainingCallback):
        def on_epoch_begin(self, epoch: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CallbackList([Stops()]).call("on_epoch_begin", 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [([ts.TrainingCallback], "pass an instance, not the class"), ([print], "expected instances"), (["abc"], "'abc'")],
)
def test_what_is_no_callback_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CallbackList(given)

"""Auxiliary losses reach the innermost collector and only single numbers are taken."""

from __future__ import annotations

import pytest
import torch

from torchslicer.errors import UserError
from torchslicer.graph.auxloss import add_aux_loss, collect_aux_losses


def test_losses_are_collected_in_order() -> None:
    add_aux_loss(torch.tensor(9.0))  # nobody collects
    first, second = torch.tensor(1.0), torch.tensor(2.0)
    with collect_aux_losses() as losses:
        add_aux_loss(first)
        add_aux_loss(second, 0.5)
    add_aux_loss(torch.tensor(9.0))
    assert [(loss is expected, weight) for (loss, weight), expected in zip(losses, (first, second), strict=True)] == [
        (True, 1.0),
        (True, 0.5),
    ]


def failing_collection(seen: list[list[tuple[torch.Tensor, float]]]) -> None:
    with collect_aux_losses() as inner:
        seen.append(inner)
        add_aux_loss(torch.tensor(1.0))
        add_aux_loss(torch.zeros(2))


def test_collectors_nest_and_end_after_an_error() -> None:
    seen: list[list[tuple[torch.Tensor, float]]] = []
    with collect_aux_losses() as outer:
        with pytest.raises(UserError, match="single number"):
            failing_collection(seen)
        add_aux_loss(torch.tensor(2.0))
    assert (len(seen[0]), len(outer)) == (1, 1)


@pytest.mark.parametrize("loss", [torch.zeros(3), torch.zeros(1), 0.5])
def test_only_single_numbers(loss: object) -> None:
    with pytest.raises(UserError, match="auxiliary loss must be"):
        add_aux_loss(loss)

"""Values over a cut: structure, in-place operations, and the bits of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchslicer.pipeline.boundary import Export, Import

CPU = torch.device("cpu")


def enter(value: Any) -> Import:
    """Hand *value* over a cut."""
    return Import(Export(value).take(), CPU)


# Three later stages, each of which uses h twice.
def first(h: Tensor) -> Tensor:
    return torch.sin(h) * h


def second(a: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(a + h) * h.exp()


def third(b: Tensor, h: Tensor) -> Tensor:
    return ((b * h) + h.cos()).sum()


def backward(roots: list[Any]) -> None:
    torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])


def split_gradient(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of w through four stages: as the boundary does it, and as a sum of per-stage gradients."""
    h_out = Export(w * 1.0)
    packet = h_out.take()
    h1, h2, h3 = (Import(packet, CPU) for _ in range(3))
    a_out = Export(first(h1.value))
    a = Import(a_out.take(), CPU)
    b_out = Export(second(a.value, h2.value))
    b = Import(b_out.take(), CPU)
    loss = third(b.value, h3.value)
    alone = [
        torch.autograd.grad(loss, h3.value, retain_graph=True)[0],
    ]
    loss.backward(retain_graph=True)
    to_b, to_h3 = b.gradients(), h3.gradients()
    backward([*b_out.roots(to_b)])
    alone.append(h2.gradients()[0])  # type: ignore[arg-type]
    # The same backward pass again, now with what came from the stage after.
    a2 = Import(a_out_packet(h1.value), CPU)
    h2again = Import(packet, CPU)
    b_again = Export(second(a2.value, h2again.value))
    backward([*b_again.roots(to_b), *h2again.roots(to_h3)])
    to_a, to_h2 = a2.gradients(), h2again.gradients()
    h1again = Import(packet, CPU)
    a_again = Export(first(h1again.value))
    backward(a_again.roots(to_a))
    alone.append(h1again.gradients()[0])  # type: ignore[arg-type]
    h1last = Import(packet, CPU)
    backward([*Export(first(h1last.value)).roots(to_a), *h1last.roots(to_h2)])
    backward(h_out.roots(h1last.gradients()))
    assert w.grad is not None
    return w.grad, (alone[2] + alone[1]) + alone[0]


def a_out_packet(h: Tensor) -> Any:
    return Export(first(h.detach().requires_grad_())).take()


def test_a_value_used_by_three_later_stages_has_the_gradient_bits_of_the_unsplit_model() -> None:
    """Through the consumers in reverse order; the plain sum of per-stage gradients has other bits, so this can fail."""
    start = torch.randn(5000)
    w = start.clone().requires_grad_()
    h = w * 1.0
    third(second(first(h), h), h).backward()  # type: ignore[no-untyped-call]
    expected = w.grad
    chained, summed = split_gradient(start.clone().requires_grad_())
    assert expected is not None
    assert torch.equal(chained, expected)
    assert torch.allclose(summed, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(summed, expected)


def test_the_identity_node_takes_an_in_place_operation() -> None:
    w = torch.randn(4, requires_grad=True)
    out = Export(w * 2.0)
    side = Import(out.take(), CPU)
    side.value.mul_(3.0).relu_()
    side.value.sum().backward()
    backward(out.roots(side.gradients()))
    assert torch.equal(w.grad, (w > 0).float() * 6.0)  # type: ignore[arg-type]


def test_the_gradient_received_is_added_although_the_value_was_changed_in_place() -> None:
    """The edge was taken when the node was made: later uses saw the value before the change."""
    side = enter(torch.ones(3, requires_grad=True) * 1.0)
    side.value.mul_(5.0)
    result = side.value.sum()
    roots = side.roots((torch.full((3,), 10.0),))
    torch.autograd.backward([result, *(edge for edge, _ in roots)], [None, *(g for _, g in roots)])  # type: ignore[list-item]
    assert torch.equal(side.gradients()[0], torch.full((3,), 15.0))  # type: ignore[arg-type]


def test_the_producers_tensor_is_left_alone_by_autograd() -> None:
    """What arrives is a leaf of its own graph on the same memory; nothing of the producer's graph hangs on it."""
    x = torch.randn(3, requires_grad=True) * 1.0
    side = enter(x)
    assert side.value.data_ptr() == x.data_ptr()
    assert side.value._base is None
    side.value.sum().backward()
    assert side.gradients()[0] is not None


def test_structures_and_values_that_are_no_tensors() -> None:
    value = {"h": torch.ones(2, requires_grad=True) * 1.0, "mask": torch.tensor([True]), "rest": (None, 3, True, [2.5])}
    export = Export(value)
    packet = export.take()
    assert packet.wants_gradient == (True, False, False, False, False, False)
    assert packet.size_bytes == 2 * 4 + 1
    side = Import(packet, CPU)
    assert side.value["rest"] == (None, 3, True, [2.5])
    assert side.value["mask"].dtype is torch.bool
    assert not side.value["mask"].requires_grad
    assert side.gradients() == (None,) * 6
    assert export.roots((None,) * 6) == []


def test_a_packet_is_taken_once_and_copies_have_memory_of_their_own() -> None:
    export = Export(torch.ones(2))
    packet = export.take()
    assert packet.copy().leaves[0].data_ptr() != packet.leaves[0].data_ptr()
    with pytest.raises(RuntimeError, match="taken already"):
        export.take()

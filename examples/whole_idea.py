"""The whole idea of split training, with PyTorch alone: read it from top to bottom, run it, change it.

A model is cut into two stages. Each stage has its own optimizer and knows nothing of the other. What crosses the cut
is one tensor forward (the activation) and one tensor back (its gradient). A batch goes through in micro-batches, and
the result is compared with the same model trained whole: not one bit differs.

TorchSlicer does the same for any model, number of stages and schedule; it finds the cut, carries every value that
crosses it, and keeps the bits where it is harder than here (dropout, tied weights, BatchNorm, in-place operations).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

NUM_MICROBATCHES = 4
STEPS = 20


# ---------------------------------------------------------------------------------------------------- a model, whole
def make_model() -> nn.Sequential:
    """Five layers; nothing in it knows that it will be cut."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Points in 16 dimensions; the class is decided by a fixed random matrix, so there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    secret = torch.randn(16, 4, generator=generator)
    points = [torch.randn(32, 16, generator=generator) for _ in range(STEPS)]
    return [(x, (x @ secret).argmax(1)) for x in points]


# ---------------------------------------------------------------------------------------------------------- a stage
class Stage:
    """A piece of the model with its optimizer. It knows no other stage, and not whether it is the first or the last."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        # What backward needs of each micro-batch in flight. A schedule's memory is the length of this dictionary.
        self.stash: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, microbatch: int, received: Tensor) -> Tensor:
        """Run the piece, and keep what backward will need."""
        # The cut: a new leaf, so that autograd stops here and leaves the gradient for the stage before in `.grad`.
        leaf = received.detach().requires_grad_(received.is_floating_point())
        output: Tensor = self.module(leaf)
        self.stash[microbatch] = (leaf, output)
        return output.detach()  # only the numbers travel, no graph

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """Go back through the piece; gradients of parameters add up over micro-batches."""
        leaf, output = self.stash.pop(microbatch)
        output.backward(gradient)
        return leaf.grad

    def step(self) -> None:
        """Update the parameters of this piece, and no others."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_gradient(output: Tensor, target: Tensor, share: float) -> tuple[float, Tensor]:
    """Return the loss of a micro-batch and its gradient by the model's output: where backward begins.

    A mean over the batch is the sum of the micro-batches' means, each weighted by its share of the samples.
    """
    leaf = output.detach().requires_grad_()
    loss = nn.functional.cross_entropy(leaf, target) * share
    loss.backward()
    if leaf.grad is None:
        raise RuntimeError("the loss does not depend on the output")
    return float(loss.detach()), leaf.grad


# -------------------------------------------------------------------------------------------------------- a schedule
# A schedule is data: for each rank a list of actions. With the stages on two machines each would walk its own list and
# wait where a value has not arrived yet; here one loop takes an action as soon as what it needs is there.
Action = tuple[str, int]


def gpipe(num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards: simple, but every micro-batch's activations are held at once."""
    work = [("F", m) for m in range(num_microbatches)] + [("B", m) for m in range(num_microbatches)]
    return [list(work), list(work)]


def one_f_one_b(num_microbatches: int) -> list[list[Action]]:
    """A backward as soon as possible: stage 0 never holds more than two micro-batches, stage 1 never more than one."""
    first: list[Action] = [("F", 0)]
    for m in range(1, num_microbatches):
        first += [("F", m), ("B", m - 1)]
    last = [(kind, m) for m in range(num_microbatches) for kind in ("F", "B")]
    return [[*first, ("B", num_microbatches - 1)], last]


# ------------------------------------------------------------------------------------------------- a step, cut in two
def split_step(stages: list[Stage], x: Tensor, y: Tensor, lists: list[list[Action]]) -> float:
    """Run one training step by walking both lists of actions."""
    inputs, targets = x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES)
    activations: dict[int, Tensor] = {}  # the channel from stage 0 to stage 1
    gradients: dict[int, Tensor] = {}  # and the one back
    losses: dict[int, float] = {}
    todo = [list(actions) for actions in lists]
    outputs: dict[int, Tensor] = {}
    while any(todo):
        for rank, actions in enumerate(todo):
            if not actions:
                continue
            kind, m = actions[0]
            if rank == 0 and kind == "F":
                activations[m] = stages[0].forward(m, inputs[m])
            elif rank == 1 and kind == "F" and m in activations:
                outputs[m] = stages[1].forward(m, activations.pop(m))
            elif rank == 1 and kind == "B":
                losses[m], start = loss_gradient(outputs.pop(m), targets[m], len(targets[m]) / len(y))
                back = stages[1].backward(m, start)
                if back is not None:
                    gradients[m] = back
            elif rank == 0 and kind == "B" and m in gradients:
                stages[0].backward(m, gradients.pop(m))
            else:
                continue  # what it needs has not arrived
            actions.pop(0)
    for stage in stages:
        stage.step()
    return sum(losses[m] for m in sorted(losses))


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """The same step without a cut: the loop that everybody writes, with gradient accumulation."""
    total = 0.0
    for inputs, targets in zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True):
        loss = nn.functional.cross_entropy(model(inputs), targets) * (len(targets) / len(y))
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return total


# -------------------------------------------------------------------------------------------------------- the proof
def main() -> None:
    """Train whole, and cut under two schedules; print the losses and the largest difference of any parameter."""
    batches, whole = make_batches(), make_model()
    start = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    losses = [whole_step(whole, optimizer, x, y) for x, y in batches]
    print(f"whole   loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    for name, lists in (("gpipe", gpipe(NUM_MICROBATCHES)), ("1f1b", one_f_one_b(NUM_MICROBATCHES))):
        model = copy.deepcopy(start)
        stages = [Stage(model[:2]), Stage(model[2:])]
        losses = [split_step(stages, x, y, lists) for x, y in batches]
        pairs = zip(whole.parameters(), model.parameters(), strict=True)
        difference = max(float((a - b).abs().max().detach()) for a, b in pairs)
        print(f"{name:7} loss {losses[0]:.4f} -> {losses[-1]:.4f}, largest difference {difference:g}")


if __name__ == "__main__":
    main()

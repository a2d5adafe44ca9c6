from __future__ import annotations

import torch

from tests.support import tvshim


def test_torchvision_can_be_imported_and_its_models_run():
    import torchvision

    model = torchvision.models.resnet18(num_classes=10).eval()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_declaring_twice_is_harmless():
    assert tvshim.declare() == tvshim.declare()

"""Cut a network into three stages and train it on handwritten digits (`pip install 'torchslicer[demo]'`)."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import torchslicer as ts

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train, test = random_split(data, [1500, 297], generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

sliced = ts.slice(model, n=3)
print(sliced.plan)
sliced.train(
    DataLoader(train, 50, shuffle=True),
    {"name": "AdamW", "params": {"lr": 3e-3}},
    "cross_entropy",
    epochs=10,
    verbose=True,
)
print(f"test accuracy {sliced.evaluate(DataLoader(test, 297), metrics=['accuracy'])['accuracy']:.1%}")

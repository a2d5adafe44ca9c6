"""The configuration of a run. This package is the only one that reads the environment, and it does not import torch.

``secret`` hides values; ``problems`` words the errors; ``fields`` and ``sections`` say what each setting accepts;
``yamlio`` reads and writes files; ``layers`` merges the sources; ``run`` puts all of it together as :class:`RunConfig`.
"""

from __future__ import annotations

from torchslicer.config.layers import LEGACY_ENVIRONMENT
from torchslicer.config.run import RunConfig
from torchslicer.config.secret import Secret

__all__ = ["LEGACY_ENVIRONMENT", "RunConfig", "Secret"]

"""TorchSlicer: cut a PyTorch model into stages and train it end to end, exactly as if it were whole."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise ImportError(
        "torchslicer needs PyTorch, which it does not install for you: the right build depends on your hardware. "
        "Install it first: 'pip install torch', or see https://pytorch.org/get-started for GPU builds"
    ) from None

from torchslicer.api import SlicedModel, slice  # noqa: A004 - the library's main function
from torchslicer.callbacks import TrainingCallback
from torchslicer.config import RunConfig
from torchslicer.errors import (
    CallbackError,
    ConfigError,
    DataError,
    NonFiniteLossError,
    RunError,
    ScheduleError,
    SecurityError,
    ShippingError,
    SliceError,
    StageError,
    TorchSlicerError,
    TraceError,
    UserError,
    VerificationError,
    WorkerFailureError,
)
from torchslicer.graph.auxloss import add_aux_loss
from torchslicer.graph.stages import (
    AuxInputStage,
    BlockStage,
    CausalLMHeadStage,
    GPT2EmbedStage,
    MoEBlockStage,
    SimpleEmbedStage,
)
from torchslicer.partition import Plan, register_strategy
from torchslicer.serving import run_worker
from torchslicer.simulation import simulate
from torchslicer.version import __version__

__all__ = [
    "AuxInputStage",
    "BlockStage",
    "CallbackError",
    "CausalLMHeadStage",
    "ConfigError",
    "DataError",
    "GPT2EmbedStage",
    "MoEBlockStage",
    "NonFiniteLossError",
    "Plan",
    "RunConfig",
    "RunError",
    "ScheduleError",
    "SecurityError",
    "ShippingError",
    "SimpleEmbedStage",
    "SliceError",
    "SlicedModel",
    "StageError",
    "TorchSlicerError",
    "TraceError",
    "TrainingCallback",
    "UserError",
    "VerificationError",
    "WorkerFailureError",
    "__version__",
    "add_aux_loss",
    "register_strategy",
    "run_worker",
    "simulate",
    "slice",
]

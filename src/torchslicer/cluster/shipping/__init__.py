"""Ship one stage's part of a cut model as plain data and tensors: no pickle, no constructors, no generated code.

The coordinator calls `encode_stage`, the worker `decode_stage` with its own `Allowed`; `values.dump` and `load` make
the text form in between. ``builder`` holds the other way: workers build the model themselves.
"""

from torchslicer.cluster.shipping.allow import Allowed, untrusted
from torchslicer.cluster.shipping.stage_codec import ShippedStage, StageGraph, encode_stage
from torchslicer.cluster.shipping.stage_restore import ReceivedStage, decode_stage

__all__ = ["Allowed", "ReceivedStage", "ShippedStage", "StageGraph", "decode_stage", "encode_stage", "untrusted"]

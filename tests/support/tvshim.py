"""Lets torchvision's models be imported beside a PyTorch that its compiled operators were not built for.

torchvision's Python files register fake kernels for operators that its compiled library defines. Where that library
cannot be loaded (a CUDA wheel beside a CPU PyTorch), ``import torchvision`` fails with "operator torchvision::nms does
not exist", although no classification model uses such an operator. Declaring the operators without kernels is enough
for the import; calling one still fails loudly.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_BOX = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_BOX_GRAD = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_MAPPED = "Tensor grad, Tensor rois, Tensor channel_mapping"
_SHAPE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORM = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias"
_DEFORM_SIZES = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_BOX}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_BOX_GRAD}, {_SHAPE}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_BOX}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_BOX_GRAD}, {_SHAPE}) -> Tensor",
    f"ps_roi_align({_BOX}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward({_MAPPED}, {_BOX_GRAD}, int sampling_ratio, {_SHAPE}) -> Tensor",
    f"ps_roi_pool({_BOX}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward({_MAPPED}, {_BOX_GRAD}, {_SHAPE}) -> Tensor",
    f"deform_conv2d({_DEFORM}, {_DEFORM_SIZES}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_DEFORM}, {_DEFORM_SIZES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)

# A declaration lives as long as its Library object; without a reference the operators vanish again.
_declared: list[torch.library.Library] = []


def declare() -> bool:
    """Declare torchvision's operators if its own library cannot; call it before ``import torchvision``.

    Returns:
        Whether the operators are stand-ins.
    """
    if not _declared and _needed():
        library = torch.library.Library("torchvision", "DEF")  # the name that the wheel's own library uses
        for schema in SCHEMAS:
            library.define(schema)
        _declared.append(library)
    return bool(_declared)


def _needed() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    library = Path(spec.origin).with_name("_C.so")
    try:
        torch.ops.load_library(str(library))
    except OSError:
        return True
    return False

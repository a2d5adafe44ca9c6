"""The exact table of functions and tensor methods that a graph from elsewhere may call.

The table is made at the first use from the public names of torch, less what reads or writes files, memory or settings
of the process, calls functions handed to it, or is Python code not written for tensors. ``tests/golden`` pins it.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import math
import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn import functional as F  # noqa: N812 - everyone calls it F

from torchslicer.errors import ShippingError
from torchslicer.graph.auxloss import add_aux_loss
from torchslicer.graph.checks import check_relation, check_size, check_value, hand_on, unpack

Function = Callable[..., Any]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_DENIED = re.compile(
    r"_.*"  # private
    r"|(from_file|from_numpy|frombuffer|from_dlpack|to_dlpack)"  # files, foreign memory
    r"|empty.*|new_empty.*|new|resize.*|set(_.*)?|storage.*|untyped_storage|.*data_ptr|as_subclass"  # memory as it lies
    r"|.*sparse_.*tensor.*|sparse_resize.*"  # made from indices that nobody has checked
    r"|(fbgemm|quantized|mkldnn|cudnn|miopen|q_|nnpack|vulkan).*|.*quantize.*|.*qparams.*|int_repr|qscheme|fused_moving.*"
    r"|.*backward.*|batch_norm_(gather|stats|el|update).*"  # expects what the forward pass made, unchecked
    r"|.*_out"  # writes into a tensor of another size
    r"|(apply|map|map2)_|register_.*|reinforce|backward|retain_grad|module_load"  # call functions, or autograd
    r"|numpy|share_memory_|pin_memory|is_pinned|record_stream|is_shared"  # leave torch, or the process
    r"|(handle|has)_torch_function.*|boolean_dispatch|assert_int_or_pair|triplet_margin_with_distance_loss"
    r"|.*nested.*|to_padded_tensor|segment_reduce|copy_sparse.*|.*overrid.*"  # can be told not to check
    r"|get_gradients|vision|glu_jvp|is_distributed|is_vulkan_available|hash_tensor|to_mkldnn"
)
_PRIVATE_ATEN = _words(
    "_softmax _log_softmax _unsafe_view _to_copy _unsafe_index _assert_async _assert_scalar "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
    "_local_scalar_dense _weight_norm _upsample_bilinear2d_aa _upsample_bicubic2d_aa "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "_prelu_kernel _safe_softmax _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu _convolution _stack _trilinear _cdist_forward "
    "_pdist_forward _unique2 _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_slogdet _linalg_svd _linalg_eigh "
    "_linalg_solve_ex _conj _is_all_true _is_any_true _ctc_loss _embedding_bag _shape_as_tensor"
)
_FUNCTIONAL = _words(
    "atleast_1d atleast_2d atleast_3d broadcast_shapes broadcast_tensors cartesian_prod block_diag cdist "
    "chain_matmul einsum istft norm meshgrid split stft tensordot unique unique_consecutive unravel_index "
    "is_tensor is_complex sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_sqrt "
    "_sym_log2 _assert is_floating_point is_grad_enabled is_autocast_enabled get_default_dtype "
    "get_autocast_dtype"
)
_OPERATOR = _words(
    "abs add and_ concat contains countOf eq floordiv ge getitem gt iadd iand iconcat ifloordiv ilshift "
    "imatmul imod imul index indexOf inv invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt "
    "matmul mod mul ne neg not_ or_ pos pow rshift setitem sub truediv truth xor"
)
_BUILTINS = _words("abs bool complex divmod float getattr int len list max min pow range round slice sum tuple")
_TORCHVISION = (
    "torchvision.models.swin_transformer._get_relative_position_bias",
    "torchvision.models.swin_transformer._patch_merging_pad",
    "torchvision.models.swin_transformer.shifted_window_attention",
    "torchvision.ops.stochastic_depth.stochastic_depth",
)
_VISION_OPS = ("torchvision.deform_conv2d.default", "torchvision.nms.default", "torchvision.roi_align.default")
_OTHER_METHODS = frozenset(("append", "copy", "get", "items", "keys", "to_tuple"))  # of lists, dictionaries, outputs
_OPERATOR_METHODS = _words(
    "abs add and bool eq float floordiv ge getitem gt iadd iand imul index int invert ior isub itruediv ixor "
    "le len lshift lt matmul mod mul ne neg or pow radd rand rfloordiv rlshift rmatmul rmod rmul ror rpow "
    "rrshift rshift rsub rtruediv rxor setitem sub truediv xor"
)

_ENDLESS = ("comb", "factorial", "perm")

ZEROED = {
    "torch.empty": "torch.zeros",
    "torch.empty_like": "torch.zeros_like",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
"""Functions that show memory as it lies, and what a worker runs in their place: the same, filled with zeros."""

ZEROED_METHODS = {"new_empty": "new_zeros"}


@functools.cache
def table() -> Mapping[str, Function]:
    """Return every function that may be called, by name, without the operators that torch looks up when asked.

    Example:
        >>> table()["torch.nn.functional.relu"] is F.relu, "torch.load" in table()
        (True, False)
    """
    return dict(sorted({**dict(_python_functions()), **dict(_torch_functions())}.items()))


def _python_functions() -> Iterator[tuple[str, Function]]:
    for name in _OPERATOR:
        yield f"operator.{name}", getattr(operator, name)
    for name in _BUILTINS:
        yield f"builtins.{name}", getattr(builtins, name)
    for name, function in vars(math).items():
        if isinstance(function, types.BuiltinFunctionType) and name not in _ENDLESS:
            yield f"math.{name}", function
    for function in (add_aux_loss, check_relation, check_size, check_value, hand_on, unpack):
        yield f"{function.__module__}.{function.__qualname__}", function


def _torch_functions() -> Iterator[tuple[str, Function]]:
    tensor_functions = torch._C._VariableFunctions
    for name in dir(tensor_functions):
        if getattr(torch, name, None) is getattr(tensor_functions, name) and not _DENIED.fullmatch(name):
            yield f"torch.{name}", getattr(torch, name)
    for name in _FUNCTIONAL:
        if hasattr(torch, name):
            yield f"torch.{name}", getattr(torch, name)
    for path, module in (("torch.special", torch.special), ("torch.linalg", torch.linalg), ("torch.fft", torch.fft)):
        for name, function in vars(module).items():
            if isinstance(function, types.BuiltinFunctionType) and not _DENIED.fullmatch(name):
                yield f"{path}.{name}", function
    for name, function in vars(F).items():
        if not _DENIED.fullmatch(name) and callable(function) and _is_tensor_function(function):
            yield f"torch.nn.functional.{name}", function


def _is_tensor_function(function: Any) -> bool:
    homes = ("torch", "torch._C._nn", "torch.nn.functional")
    return not inspect.isclass(function) and getattr(function, "__module__", None) in homes


@functools.cache
def operators() -> frozenset[str]:
    """Return the names of the operators (``aten.linear.default``) that may be called."""
    found = set(_VISION_OPS)
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        admitted = name in _PRIVATE_ATEN or not _DENIED.fullmatch(name)
        if space == "aten" and admitted and not re.fullmatch(r"(.*_)?out", overload):
            found.add(f"aten.{name}.{overload or 'default'}")
    return frozenset(found)


@functools.cache
def methods() -> frozenset[str]:
    """Return the names of the methods that may be called.

    Example:
        >>> "view" in methods(), "apply_" in methods(), "__reduce_ex__" in methods()
        (True, False, False)
    """
    names = {name for name in dir(torch.Tensor) if not _DENIED.fullmatch(name) and _is_method(name)}
    return frozenset(names | _OTHER_METHODS | {f"__{name}__" for name in _OPERATOR_METHODS})


def _is_method(name: str) -> bool:
    return callable(getattr(torch.Tensor, name, None))


@functools.cache
def _names() -> Mapping[int, str]:
    """Identity of each function to its name; a function of several names goes by the last, ``torch.relu`` say."""
    return {id(function): name for name, function in table().items()}


def listed_name(function: Any) -> str | None:
    """Return the name under which *function* is in the table, or None.

    Example:
        >>> listed_name(operator.add), listed_name(torch.load)
        ('operator.add', None)
    """
    if isinstance(function, OpOverload):
        name = ZEROED.get(str(function), str(function))
        return name if name in operators() else None
    if function is torch.empty or function is torch.empty_like:
        return ZEROED[f"torch.{function.__name__}"]
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if name in _TORCHVISION and _from_torchvision(name) is function:
        return name
    return _names().get(id(function))


def listed_function(name: str) -> Function | None:
    """Return the function called *name* in the table, or None.

    Raises:
        ShippingError: The table has it, but this installation does not.
    """
    if name in table():
        return table()[name]
    try:
        if name in operators():
            space, operation, overload = name.split(".")
            return getattr(getattr(getattr(torch.ops, space), operation), overload)  # type: ignore[no-any-return]
        if name in _TORCHVISION:
            return _from_torchvision(name)
    except (AttributeError, ImportError) as error:
        raise ShippingError(f"function '{name}' is missing here ({error}); install torchvision") from error
    return None


def _from_torchvision(name: str) -> Function:
    module, _, attribute = name.rpartition(".")
    found: Function = getattr(importlib.import_module(module), attribute)
    return found


def check_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the constant arguments of functions whose arguments decide what is run.

    Raises:
        ShippingError: ``getattr`` for anything but a plain attribute, ``max`` with a function, and the like.
    """
    if name == "builtins.getattr":
        if kwargs or len(args) not in (2, 3) or not _is_plain_attribute(args[1]):
            raise ShippingError(f"a graph may read attributes such as 'shape', not {args[1:]!r:.80}")
    elif name.startswith("builtins.") and kwargs:
        raise ShippingError(f"{name} takes no keyword arguments in a graph, got {list(kwargs)!r:.80}")
    elif name == f"{check_relation.__module__}.check_relation" and not _is_short_relation(args):
        raise ShippingError("check_relation takes a short comparison of sizes")


def _is_short_relation(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], str) and len(args[0]) <= _MAX_RELATION and "**" not in args[0]


_MAX_RELATION = 4096


def _is_plain_attribute(name: Any) -> bool:
    """Whether *name* is an attribute that holds data: not private, and no method of a tensor."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        return False
    return not _is_method(name) and name not in ("grad_fn", "volatile")

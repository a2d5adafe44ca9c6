"""What a worker accepts: the classes and functions that a description from elsewhere may name.

The list is the worker's own and never comes over the wire. Users add packages to it (``--trust my_package``); only
modules of listed packages are ever imported.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from torchslicer.cluster.shipping import functions
from torchslicer.cluster.shipping.names import look_up, name_of, shorten, split_name
from torchslicer.errors import ShippingError, nearest

_MODULE_HOMES = re.compile(
    r"torch\.nn\.modules\.\w+"
    r"|torchvision\.models(\.\w+)*|torchvision\.ops\.(misc|stochastic_depth)"
    r"|transformers\.models\.\w+\.modeling_\w+|transformers\.(activations|pytorch_utils|modeling_layers)"
    r"|torchslicer\.graph\.stages"
)
_DATA_HOMES = re.compile(
    r"torchvision\.(models(\.\w+)*|ops\.misc)|transformers\.modeling_outputs|transformers\.models\.\w+\.modeling_\w+"
)
_CONFIG_HOMES = re.compile(
    r"transformers\.models\.\w+\.configuration_\w+|transformers\.(generation\.)?configuration_utils"
)
_DENIED_HOMES = re.compile(
    r"(torch\.(fx|jit|distributed|package|ao|export|_export|_dynamo|_inductor|hub|serialization|quantization"
    r"|nn\.(quantized|quantizable|qat|intrinsic|parallel|utils\.parametri[sz]\w*)|masked|onnx|utils)"
    r"|torchvision\.models\.(quantization|feature_extraction))(\..*)?"
)
_UNTRUSTABLE = frozenset({*sys.stdlib_module_names, "torch", "torchslicer", "numpy", "pip", "setuptools", "pytest"})
_PACKAGE = re.compile(r"(?!__)[A-Za-z_]\w*(\.(?!__)[A-Za-z_]\w*)*")
_BUILDERS = re.compile(r"(?!__)[A-Za-z_]\w*((\.\w+)*|(\.[\w*?]+)*:[\w.*?]+)")
_NAMESPACES = {"types:SimpleNamespace": types.SimpleNamespace, "argparse:Namespace": Namespace}
_OUR_STATE = re.compile(r"(torch\.nn\.modules|torchslicer\.graph\.stages)(\..*)?")


class Allowed:
    """The allow-list of one worker.

    Args:
        trusted_packages: Packages (or modules in them) whose classes and functions are accepted, and imported. They are
            trusted whole: whoever sends a description may call any function that is defined in them.
        allow_builders: Builders that may be called: ``"my_package.models:make"``, a pattern such as
            ``"my_package.models:make_*"``, or a package or module, for all that is defined in it.

    Raises:
        ShippingError: A package must not be trusted, since anything could be run through it.

    Example:
        >>> Allowed().module_class("torch.nn.modules.linear:Linear").__name__
        'Linear'
        >>> Allowed().function("builtins:eval")
        Traceback (most recent call last):
        torchslicer.errors.ShippingError: module 'builtins' is not on this worker's list
    """

    def __init__(self, trusted_packages: Iterable[str] = (), *, allow_builders: Iterable[str] = ()) -> None:
        self.trusted_packages = tuple(trusted_packages)
        self.allow_builders = tuple(allow_builders)
        for package in self.trusted_packages:
            if not _PACKAGE.fullmatch(package) or package.split(".")[0] in _UNTRUSTABLE:
                raise ShippingError(
                    f"trust {shorten(package)}: expected the name of your own package; the standard library and torch "
                    "could run anything, so single functions of theirs are listed instead"
                )
        for pattern in self.allow_builders:
            if not _BUILDERS.fullmatch(pattern) or re.split("[.:]", pattern)[0] in _UNTRUSTABLE:
                raise ShippingError(
                    f"allow builder {shorten(pattern)}: expected a function of a package of yours, such as "
                    "'my_package.models:make', or the package; the standard library and torch could run anything"
                )

    def trusts(self, module: str) -> bool:
        """Whether *module* belongs to a package that the user has listed."""
        return any(module == package or module.startswith(package + ".") for package in self.trusted_packages)

    def _admit(self, module: str, *homes: re.Pattern[str]) -> None:
        """Refuse a module from which nothing may come; called before anything is imported."""
        if _DENIED_HOMES.fullmatch(module):
            raise ShippingError(f"nothing of module '{module}' can be shipped")
        if not any(home.fullmatch(module) for home in homes) and not self.trusts(module):
            self._refuse(module)

    def _refuse(self, module: str) -> NoReturn:
        root = module.split(".", maxsplit=1)[0]
        advice = "" if root in _UNTRUSTABLE else f"; start the worker with --trust {root} to accept it"
        raise ShippingError(f"module '{module}' is not on this worker's list{advice}")

    def _found(self, name: Any, *homes: re.Pattern[str]) -> Any:
        module, qualname = split_name(name)
        self._admit(module, *homes)
        found = look_up(module, qualname)
        if getattr(found, "__module__", None) != module or getattr(found, "__qualname__", None) != qualname:
            raise ShippingError(f"'{name}' is only another name of something, or no class or function")
        return found

    def module_class(self, name: Any) -> type[nn.Module]:
        """Return the `nn.Module` class called *name*.

        Raises:
            ShippingError: It is not accepted.
        """
        found = self._found(name, _MODULE_HOMES)
        if not isinstance(found, type) or not issubclass(found, nn.Module):
            raise ShippingError(f"'{name}' is no torch.nn.Module class")
        check_module_class(found)
        return found

    def data_class(self, name: Any) -> type:
        """Return a class of plain data: an enum, a named tuple, a dataclass, a namespace, a configuration.

        Raises:
            ShippingError: It is not accepted.
        """
        if name in _NAMESPACES:
            return _NAMESPACES[name]
        found = self._found(name, _DATA_HOMES, _CONFIG_HOMES, _MODULE_HOMES)
        if not isinstance(found, type) or issubclass(found, nn.Module) or not is_data_class(found):
            raise ShippingError(f"'{name}' is no enum, named tuple, dataclass or configuration")
        _check_plain(found)
        return found

    def output_class(self, name: Any) -> type:
        """Return a named tuple or dataclass that a model returns; a graph calls its constructor.

        Raises:
            ShippingError: It is not accepted.
        """
        found = self._found(name, _DATA_HOMES)
        if not isinstance(found, type) or not is_output_class(found):
            raise ShippingError(f"'{name}' is no named tuple or dataclass that a model could return")
        return found

    def function(self, name: Any) -> Callable[..., Any]:
        """Return the function called *name*: one of the table, or a function of a trusted package.

        Raises:
            ShippingError: It is not accepted.
        """
        if not isinstance(name, str):
            raise ShippingError(f"expected the name of a function, got {shorten(name)}")
        if ":" not in name:
            listed = functions.listed_function(name)
            if listed is None:
                raise ShippingError(f"function '{name:.80}' is not on the list{nearest(name, functions.table())}")
            return listed
        found = self._found(name)
        if not isinstance(found, types.FunctionType):
            raise ShippingError(f"'{name}' is no Python function")
        return found

    def factory(self, name: Any) -> Any:
        """Return a class or function of a trusted package that makes an optimizer, scheduler or loss.

        Raises:
            ShippingError: It is not accepted.
        """
        found = self._found(name)
        if not isinstance(found, (type, types.FunctionType)):
            raise ShippingError(f"'{name}' is no class or function")
        return found

    def autograd_function(self, name: Any) -> type[torch.autograd.Function]:
        """Return the `torch.autograd.Function` class called *name* of a trusted package.

        Raises:
            ShippingError: It is not accepted.
        """
        found = self._found(name)
        if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
            raise ShippingError(f"'{name}' is no torch.autograd.Function")
        return found

    def method(self, name: Any) -> str:
        """Return *name* if it is a tensor method that may be called.

        Raises:
            ShippingError: It is not accepted.
        """
        if not isinstance(name, str) or name not in functions.methods():
            raise ShippingError(f"method {shorten(name)} is not on the list of tensor methods")
        return name

    def builder(self, reference: Any) -> Callable[..., Any]:
        """Return the function that builds a model, if a pattern of this worker allows it.

        Raises:
            ShippingError: It is not accepted.
        """
        module, qualname = split_name(reference)
        if not self.allows_builder(reference):
            raise ShippingError(
                f"builder '{reference}' is not among the builders that this worker allows "
                f"({list(self.allow_builders)}); start it with --allow-builder {reference}"
            )
        found = look_up(module, qualname)
        if not isinstance(found, (types.FunctionType, type)):
            raise ShippingError(f"builder '{reference}' is no function or class, but a {type(found).__name__}")
        if found.__module__ != module:
            raise ShippingError(
                f"builder '{reference}' is defined in another module; write '{found.__module__}:{found.__qualname__}'"
            )
        return found

    def allows_builder(self, reference: str) -> bool:
        """Whether a pattern of this worker allows the builder called *reference*.

        Example:
            >>> allowed = Allowed(allow_builders=["nets.small:make", "zoo"])
            >>> [allowed.allows_builder(name) for name in ("nets.small:make", "nets.small:other", "zoo.big:make")]
            [True, False, True]
        """
        module = reference.partition(":")[0]
        return any(
            fnmatchcase(reference, pattern) if ":" in pattern else module == pattern or module.startswith(pattern + ".")
            for pattern in self.allow_builders
        )


class Importable(Allowed):
    """What some worker could accept: the caller's side of the same rules.

    After encoding, ``required`` holds the modules of users that the workers must trust.
    """

    def __init__(self) -> None:
        super().__init__()
        self.required: set[str] = set()

    def trusts(self, module: str) -> bool:
        """Note *module* as one that workers must trust, unless nobody can trust it."""
        if module.split(".", maxsplit=1)[0] in _UNTRUSTABLE:
            return False
        self.required.add(module)
        return True

    def _refuse(self, module: str) -> NoReturn:
        raise ShippingError(f"no worker accepts anything of module '{module}'")

    def name_of_module_class(self, cls: type) -> str:
        """Return the name of a module class, having checked that a worker can accept it."""
        check_module_class(cls)
        self.module_class(name := name_of(cls))
        return name

    def name_of_function(self, function: Any) -> str:
        """Return the name of a function, having checked that a worker can accept it."""
        listed = functions.listed_name(function)
        if listed is None:
            self.function(listed := name_of(function))
        return listed

    def name_of_output_class(self, cls: type) -> str:
        """Return the name of a class that a model returns, having checked that a worker can accept it."""
        self.output_class(name := name_of(cls))
        return name

    def name_of_data_class(self, cls: type) -> str:
        """Return the name of a class of plain data, having checked that a worker can accept it."""
        name = next((name for name, known in _NAMESPACES.items() if known is cls), None) or name_of(cls)
        self.data_class(name)
        return name


def untrusted(required: Iterable[str], trusted_packages: Iterable[str]) -> tuple[str, ...]:
    """Return those of the *required* modules that a worker with *trusted_packages* would refuse.

    Example:
        >>> untrusted(["net.blocks", "netting"], ["net"])
        ('netting',)
    """
    allowed = Allowed(trusted_packages)
    return tuple(module for module in required if not allowed.trusts(module))


def is_data_class(cls: type) -> bool:
    """Whether objects of *cls* are plain data that can be made without its constructor."""
    return (
        issubclass(cls, enum.Enum)
        or dataclasses.is_dataclass(cls)
        or is_namedtuple(cls)
        or is_config(cls)
        or is_namespace(cls)
    )


def is_output_class(cls: type) -> bool:
    """Whether *cls* is a named tuple or dataclass, and neither module nor configuration."""
    return (is_namedtuple(cls) or dataclasses.is_dataclass(cls)) and not (
        issubclass(cls, (nn.Module, enum.Enum)) or is_config(cls)
    )


def is_namespace(cls: type) -> bool:
    """Whether *cls* is one of the two namespaces of the standard library."""
    return cls in _NAMESPACES.values()


def is_namedtuple(cls: type) -> bool:
    """Whether *cls* is a named tuple."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def is_config(cls: type) -> bool:
    """Whether *cls* is a model configuration of transformers."""
    return any(base.__module__.startswith("transformers.") and base.__name__ in _CONFIG_BASES for base in cls.__mro__)


_CONFIG_BASES = ("PretrainedConfig", "PreTrainedConfig", "GenerationConfig")


def check_module_class(cls: type) -> None:
    """Refuse module classes whose objects are more than attributes, submodules and tensors.

    Raises:
        ShippingError: The message says what is in the way.
    """
    for base in cls.__mro__:
        if _DENIED_HOMES.fullmatch(base.__module__):
            raise ShippingError(f"class {cls.__qualname__} comes from {base.__module__}, which cannot be shipped")
    if issubclass(cls, LazyModuleMixin):
        raise ShippingError(f"class {cls.__qualname__} is a lazy module; run it on a batch first")
    _check_plain(cls)


def _check_plain(cls: type) -> None:
    for base in cls.__mro__:
        own = vars(base)
        if base is object or _OUR_STATE.fullmatch(base.__module__) or is_namedtuple(base):
            continue
        if issubclass(base, enum.Enum) or base.__module__ in ("builtins", "typing", "abc", "enum"):
            continue
        for name in ("__reduce__", "__reduce_ex__", "__setstate__", "__new__"):
            if name in own:
                raise ShippingError(
                    f"class {cls.__qualname__} defines {name} (in {base.__qualname__}): it says itself how it is "
                    "copied, which would run code of its own on the worker"
                )
        if issubclass(cls, nn.Module) and own.get("__slots__"):
            raise ShippingError(f"class {cls.__qualname__} keeps values in __slots__ (of {base.__qualname__})")

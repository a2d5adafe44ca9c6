"""Names of classes and functions, ``package.module:Qualified.name``, and what they stand for.

Looking a name up imports its module, which runs code: only names that a list of the worker admits are looked up.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from torchslicer.errors import ShippingError, nearest

_DOTTED = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*"
_NAME = re.compile(rf"({_DOTTED}):({_DOTTED})")
_MAX_NAME = 512

REMEDY = (
    "Put it under a name of its own into a module of a package that the workers have too, and start them with --trust "
    "PACKAGE; or cut around it with pack="
)
"""What to do about something that cannot be shipped."""


def split_name(name: Any) -> tuple[str, str]:
    """Return module and qualified name of ``"module:qualname"``.

    Raises:
        ShippingError: It is no such name, or has a part such as ``__main__``.

    Example:
        >>> split_name("torch.nn.modules.linear:Linear")
        ('torch.nn.modules.linear', 'Linear')
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) and len(name) <= _MAX_NAME else None
    if match is None or any(part.startswith("__") for part in re.split("[.:]", match[0])):
        raise ShippingError(f"expected a name such as 'package.module:Class', got {shorten(name)}")
    return match[1], match[2]


def look_up(module: str, qualname: str) -> Any:
    """Import *module*, which the caller has admitted, and return what *qualname* names in it.

    Raises:
        ShippingError: The module cannot be imported, or has no such name.
    """
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ShippingError(f"module '{module}' cannot be imported here ({error}); install its package") from error
    for part in qualname.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise ShippingError(
                f"module '{module}' has no '{qualname}' here{nearest(part, known)}; is its package of another version?"
            )
        found = getattr(found, part)
    return found


def name_of(thing: Any) -> str:
    """Return the name under which *thing*, a class or function, can be found by another process.

    Raises:
        ShippingError: It has none; the message says why.

    Example:
        >>> name_of(re.compile)
        're:compile'
    """
    module, qualname = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise ShippingError(f"a {type(thing).__name__} has no name by which a worker could find it")
    why = _why_hidden(module, qualname)
    if why:
        raise ShippingError(f"{qualname} of module '{module}' {why}")
    name = f"{module}:{qualname}"
    if look_up(*split_name(name)) is not thing:
        raise ShippingError(f"'{name}' is another object than the one used (it was replaced or wrapped)")
    return name


def _why_hidden(module: str, qualname: str) -> str:
    if "<lambda>" in qualname:
        return "is a lambda: it has no name by which a worker could find it"
    if "<locals>" in qualname:
        return "is defined inside a function: a worker cannot find it by name"
    if module in ("__main__", "__mp_main__"):
        return "is defined in the script that was started (__main__): a worker cannot import it"
    return ""


def shorten(value: Any) -> str:
    """Return the text of a value that came from somewhere else, short enough for a message."""
    if isinstance(value, str):
        value = value[:100]
    known = isinstance(value, (str, float, type(None))) or (isinstance(value, int) and value.bit_length() < 128)
    text = repr(value) if known else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."

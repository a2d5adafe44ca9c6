"""What a forward pass may leave behind in the attributes of modules: remembered, compared, put back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


@dataclass(frozen=True)
class AttributeSnapshot:
    """The attributes of some modules at one moment, with what plain lists, dictionaries and sets in them held."""

    attributes: dict[nn.Module, dict[str, Any]]
    contents: list[tuple[Any, Any]]

    @classmethod
    def take(cls, modules: Iterable[nn.Module]) -> AttributeSnapshot:
        """Remember the attributes of *modules* themselves, not of the modules inside them."""
        attributes = {module: dict(vars(module)) for module in modules}
        containers = {
            id(value): value for values in attributes.values() for value in values.values() if _is_container(value)
        }
        return cls(attributes, [(value, value.copy()) for value in containers.values()])

    def changed(self) -> list[str]:
        """Return the names of attributes that were set, or whose content was changed, since."""
        held = {id(container): content for container, content in self.contents}
        names: dict[str, None] = {}
        for module, before in self.attributes.items():
            now = vars(module)
            for name in {**before, **now}:
                old, new = before.get(name, _MISSING), now.get(name, _MISSING)
                if new is not old or (id(new) in held and not _same_items(new, held[id(new)])):
                    names[name] = None
        return list(names)

    def restore(self) -> None:
        """Put everything back as it was."""
        for container, content in self.contents:
            if not _same_items(container, content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for module, attributes in self.attributes.items():
            vars(module).clear()
            vars(module).update(attributes)


_MISSING = object()


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS


def own_copy(value: Any) -> Any:
    """Return a copy of a plain list, dictionary or set, and anything else as it is."""
    return value.copy() if _is_container(value) else value


def _same_items(a: Any, b: Any) -> bool:
    """Whether two containers hold the very same objects; values are not compared, they may be anything."""
    if isinstance(a, dict):
        return len(a) == len(b) and all(key is other and a[key] is b[other] for key, other in zip(a, b, strict=True))
    if isinstance(a, set):
        return {id(item) for item in a} == {id(item) for item in b}
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))

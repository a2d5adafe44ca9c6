"""Reads and writes the YAML of a configuration.

Only plain data, and stricter than PyYAML: YAML 1.2 numbers (``1e-4`` is a float, ``010`` is ten), no ``yes``/``no``
surprises, a key given twice is an error, and the line of every setting can be asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchslicer.config.problems import Loc
from torchslicer.config.secret import MASK, Secret
from torchslicer.errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_NODES = 100_000
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + name for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}

_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML keeps its tables in class attributes


class _Dumper(yaml.SafeDumper):
    """Keeps PyYAML's YAML 1.1 rules beside ours: text that either would read as a number is quoted."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.Node) -> int:
    text = str(loader.construct_scalar(node))  # type: ignore[arg-type]
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # PyYAML writes Unicode line breaks unquoted and reads them as spaces, so such text goes into double quotes
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(_TAG + "str", str(text), style=style)


for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$", re.ASCII), _first)
_Loader.add_constructor(_TAG + "int", _construct_int)
_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(str, _represent_text)
_Dumper.add_representer(Secret, lambda dumper, _secret: dumper.represent_str(MASK))


@dataclass(frozen=True)
class Document:
    """The settings of one file, and where each of them stands."""

    path: str
    data: dict[str, Any]
    root: yaml.Node | None

    def where(self, loc: Loc) -> str:
        """Say file and line of the setting at *loc*, or of the innermost part of it that is in the file."""
        line = None
        node = self.root
        for part in loc:
            found = _child(node, part)
            if found is None:
                break
            line, node = found
        return self.path if line is None else f"{self.path}, line {line}"


def read_yaml(path: Path) -> Document:
    """Read the settings of a file.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or is not a mapping of plain data.
    """
    text = _read_text(path)
    try:
        root, data = _parse(text, str(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path}: not valid YAML: {reason}") from None
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}, line 1: expected sections such as 'training:', got {data!r:.80}")
    return Document(str(path), data or {}, root)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: the configuration cannot be read: {error.strerror or error}") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{path}: expected a configuration of at most {_MAX_BYTES} bytes, this file is longer")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, found another byte at offset {error.start}") from None


def _parse(text: str, path: str) -> tuple[yaml.Node | None, Any]:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, None
        _check_nodes(root, path)
        return root, loader.construct_document(root)
    finally:
        loader.dispose()


def _check_nodes(root: yaml.Node, path: str) -> None:
    """Refuse what is not plain data. Counting every use of an anchor stops documents that unfold without end."""
    stack, count = [root], 0
    while stack:
        node = stack.pop()
        count += 1
        if count > _MAX_NODES:
            raise ConfigError(f"{path}: expected at most {_MAX_NODES} values, the anchors unfold to more")
        if node.tag not in _PLAIN_TAGS:
            raise ConfigError(f"{_at(path, node)}: the tag {node.tag} is not plain data; remove it")
        if isinstance(node, yaml.MappingNode):
            _check_keys(node, path)
            stack.extend(value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            stack.extend(node.value)


def _check_keys(node: yaml.MappingNode, path: str) -> None:
    first_line: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag not in (_TAG + "str", _TAG + "merge"):
            raise ConfigError(f"{_at(path, key)}: expected a name as the key, got {key.value!r:.80}")
        if key.value in first_line:
            raise ConfigError(f"{_at(path, key)}: the key '{key.value}' is given in line {first_line[key.value]} too")
        first_line[key.value] = key.start_mark.line + 1


def _at(path: str, node: yaml.Node) -> str:
    return f"{path}, line {node.start_mark.line + 1}"


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item.start_mark.line + 1, item
    return None


def to_yaml_text(data: dict[str, Any]) -> str:
    """Write plain data as YAML that :func:`read_yaml` reads back as the same data.

    >>> print(to_yaml_text({"lr": 1e-4, "name": "1e-4"}), end="")
    lr: 0.0001
    name: '1e-4'
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000)

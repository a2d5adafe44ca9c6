"""A value that must never be printed, logged or written."""

from __future__ import annotations

import hmac
from typing import Any, NoReturn

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

MASK = "***"


class Secret:
    """A token or a key whose ``repr``, ``str``, JSON and YAML forms are all ``***``.

    >>> token = Secret("hunter2")
    >>> print(token, [token], f"{token}")
    *** [***] ***
    >>> token.reveal()
    'hunter2'
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        """Keep *value* out of sight."""
        self._value = value

    def reveal(self) -> str:
        """Return the value itself; the only way to get it."""
        return self._value

    def __repr__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be pickled; pass on what reveal() gives, if that is meant")

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept a string or a Secret, and write ``***``."""
        from_text = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        return core_schema.union_schema(
            [core_schema.is_instance_schema(cls), from_text],
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )

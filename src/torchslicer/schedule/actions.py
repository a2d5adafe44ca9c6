"""A schedule is data: for each rank, the list of actions it performs in one step.

``2F0`` is the forward of stage 2 for micro-batch 0; ``1SEND_F3`` hands what stage 1 made of micro-batch 3 to every
stage on another rank that uses it; ``0STEP`` is the optimizer step of stage 0. Nothing here knows torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from torchslicer.errors import ScheduleError, nearest


class ActionKind(str, Enum):
    """What an action does, in the letters of the field.

    ``B`` is the whole backward; ``I`` (gradient of the inputs) and ``W`` (gradient of the weights) are its halves.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    STEP = "STEP"

    __hash__ = str.__hash__  # Enum's own hash is a Python function: too slow for half a million actions

    @property
    def is_backward(self) -> bool:
        """True for the kinds that make the gradient of a stage's inputs: B and I."""
        return self in (ActionKind.B, ActionKind.I)

    @property
    def is_communication(self) -> bool:
        """True for SEND_F, RECV_F, SEND_B and RECV_B."""
        return self in _COMMUNICATION


_COMMUNICATION = frozenset({ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B})
_KINDS = "|".join(kind.value for kind in ActionKind)
_NUMBER = "0|[1-9][0-9]*"
_ACTION = re.compile(rf"({_NUMBER})({_KINDS})({_NUMBER})?")
_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_HEADER_FIELDS = ("stages", "microbatches", "ranks", "boundaries")


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one stage; ``microbatch`` is None for STEP only.

    Raises:
        ScheduleError: a number is negative, or the micro-batch is missing or out of place.

    >>> str(Action(ActionKind.F, 2, 0))
    '2F0'
    >>> Action.parse("0STEP")
    Action('0STEP')
    """

    kind: ActionKind
    stage: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if self.stage < 0 or (self.microbatch is not None and self.microbatch < 0):
            raise ScheduleError(f"action: stage and micro-batch count from 0, got {self.stage} and {self.microbatch}")
        if (self.kind is ActionKind.STEP) != (self.microbatch is None):
            expected = "no micro-batch" if self.kind is ActionKind.STEP else "a micro-batch"
            raise ScheduleError(
                f"action {self.kind.value} of stage {self.stage}: expected {expected}, got {self.microbatch}"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    def __repr__(self) -> str:
        return f"Action('{self}')"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            ScheduleError: *text* is not an action.

        >>> Action.parse("1SEND_F3").microbatch
        3
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"action {text!r}: expected stage, kind and micro-batch such as '2F0', '1SEND_F3' or '0STEP'"
                f" (kinds: {_KINDS.replace('|', ', ')})"
            )
        stage, kind, microbatch = match.groups()
        return cls(ActionKind(kind), int(stage), None if microbatch is None else int(microbatch))


def check_count(what: str, value: object) -> None:
    """Refuse a count that is not an integer of at least 1.

    Raises:
        ScheduleError: *value* is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"{what}: expected an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class Schedule:
    """The order of work of one step: one list of actions for each rank.

    ``boundaries`` are the pairs (producer stage, consumer stage) that communication actions serve; None means
    that every stage hands its output to the next stage only.

    Raises:
        ScheduleError: a count is not positive, the name has odd characters, or a boundary does not lead forward.

    >>> schedule = Schedule("tiny", 1, 1, ((Action.parse("0F0"), Action.parse("0B0"), Action.parse("0STEP")),))
    >>> print(schedule.to_text(), end="")
    schedule tiny stages=1 microbatches=1 ranks=1
    0F0,0B0,0STEP
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    boundaries: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        check_count("num_stages", self.num_stages)
        check_count("num_microbatches", self.num_microbatches)
        check_count("number of ranks", len(self.ranks))
        if _NAME.fullmatch(self.name) is None:
            raise ScheduleError(f"schedule name: expected letters, digits or any of '_.+-', got {self.name!r}")
        for producer, consumer in self.boundaries or ():
            if not 0 <= producer < consumer < self.num_stages:
                raise ScheduleError(
                    f"schedule {self.name!r}: boundary {producer}>{consumer} must lead from a stage to a later one"
                    f" of the {self.num_stages} stages"
                )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def placement(self) -> tuple[int | None, ...]:
        """For each stage the first rank that has an action of it; None for a stage that no rank has."""
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                found.setdefault(action.stage, rank)
        return tuple(found.get(stage) for stage in range(self.num_stages))

    @property
    def has_communication(self) -> bool:
        """True if any rank sends or receives."""
        return any(action.kind.is_communication for actions in self.ranks for action in actions)

    @cached_property
    def crossings(self) -> tuple[tuple[int, int], ...]:
        """The boundaries whose two stages are on different ranks."""
        pairs = self.boundaries
        if pairs is None:
            pairs = tuple((stage, stage + 1) for stage in range(self.num_stages - 1))
        return tuple(pair for pair in pairs if self.placement[pair[0]] != self.placement[pair[1]])

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that *rank* holds, ascending.

        Raises:
            ScheduleError: there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError(f"schedule {self.name!r}: expected a rank from 0 to {self.num_ranks - 1}, got {rank}")
        return tuple(sorted({action.stage for action in self.ranks[rank]}))

    def to_text(self) -> str:
        """The schedule as text: a header line, then one line for each rank; `parse` reads it back."""
        header = (
            f"schedule {self.name} stages={self.num_stages} microbatches={self.num_microbatches} ranks={self.num_ranks}"
        )
        if self.boundaries is not None:
            header += " boundaries=" + ",".join(f"{producer}>{consumer}" for producer, consumer in self.boundaries)
        return "\n".join([header, *(",".join(map(str, actions)) for actions in self.ranks)]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what `to_text` wrote; blank lines after the last rank do no harm.

        Raises:
            ScheduleError: the header or an action cannot be read, or lines are missing or left over.
        """
        header, *lines = text.splitlines() or [""]
        name, fields = _parse_header(header)
        num_ranks = _number("ranks", fields)
        rest = lines[num_ranks:]
        if len(lines) < num_ranks or any(line.strip() for line in rest):
            raise ScheduleError(f"schedule {name!r}: the header says {num_ranks} ranks, got {len(lines)} lines")
        ranks = tuple(_parse_rank(name, rank, line) for rank, line in enumerate(lines[:num_ranks]))
        boundaries = _parse_boundaries(fields["boundaries"]) if "boundaries" in fields else None
        return cls(name, _number("stages", fields), _number("microbatches", fields), ranks, boundaries)


def _parse_header(line: str) -> tuple[str, dict[str, str]]:
    words = line.split()
    if len(words) < 2 or words[0] != "schedule":
        raise ScheduleError(f"schedule text: expected 'schedule NAME stages=S microbatches=M ranks=R', got {line!r}")
    fields: dict[str, str] = {}
    for word in words[2:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _HEADER_FIELDS or key in fields:
            known = ", ".join(_HEADER_FIELDS)
            raise ScheduleError(
                f"schedule text: header field {word!r}: expected each of {known} once{nearest(key, _HEADER_FIELDS)}"
            )
        fields[key] = value
    return words[1], fields


def _number(key: str, fields: dict[str, str]) -> int:
    value = fields.get(key, "")
    if re.fullmatch(r"[1-9][0-9]*", value) is None:
        raise ScheduleError(f"schedule text: expected {key}=<number of at least 1> in the header, got {value!r}")
    return int(value)


def _parse_rank(name: str, rank: int, line: str) -> tuple[Action, ...]:
    if not line.strip():
        return ()
    try:
        return tuple(map(Action.parse, line.split(",")))
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}, rank {rank}: {error}") from None


def _parse_boundaries(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(_parse_pairs(text.split(","))) if text else ()


def _parse_pairs(words: Iterable[str]) -> Iterable[tuple[int, int]]:
    for word in words:
        match = re.fullmatch(r"([0-9]+)>([0-9]+)", word)
        if match is None:
            raise ScheduleError(f"schedule text: boundary {word!r}: expected PRODUCER>CONSUMER such as '0>1'")
        yield int(match[1]), int(match[2])

"""The schedules, each a pure function of the number of stages and of micro-batches, and their registry.

Forwards and backwards go in ascending micro-batch order in every schedule: gradients accumulate in that order, so the
bits of a step do not depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from torchslicer.errors import ScheduleError, nearest
from torchslicer.schedule.actions import Action, ActionKind, Schedule, check_count
from torchslicer.schedule.passes import validate

Generator = Callable[[int, int], Schedule]
"""Makes a schedule from ``num_stages`` and ``num_microbatches``."""

_GENERATORS: dict[str, Generator] = {}


def register_schedule(name: str) -> Callable[[Generator], Generator]:
    """Make a generator known as *name*.

    Raises:
        ScheduleError: the name is taken.

    >>> @register_schedule("doctest-only")
    ... def mine(num_stages: int, num_microbatches: int) -> Schedule:
    ...     return gpipe(num_stages, num_microbatches)
    >>> generate("doctest-only", 1, 2).name
    'gpipe'
    >>> unregister_schedule("doctest-only")
    """

    def register(generator: Generator) -> Generator:
        if name in _GENERATORS:
            raise ScheduleError(f"schedule {name!r} is already registered; take another name or unregister it first")
        _GENERATORS[name] = generator
        return generator

    return register


def unregister_schedule(name: str) -> None:
    """Forget a generator.

    Raises:
        ScheduleError: the name is not known.
    """
    _lookup(name)
    del _GENERATORS[name]


def schedule_names() -> tuple[str, ...]:
    """The names that `generate` knows, sorted.

    >>> schedule_names()
    ('1f1b', 'eager-1f1b', 'gpipe')
    """
    return tuple(sorted(_GENERATORS))


def generate(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Make and validate the schedule known as *name*.

    Raises:
        ScheduleError: the name is not known, a count is not positive, or a registered generator made a schedule
            that is invalid or of another size.

    >>> print(generate("1f1b", 2, 2).to_text(), end="")
    schedule 1f1b stages=2 microbatches=2 ranks=2
    0F0,0F1,0B0,0B1,0STEP
    1F0,1B0,1F1,1B1,1STEP
    """
    generator = _lookup(name)
    check_count("num_stages", num_stages)
    check_count("num_microbatches", num_microbatches)
    schedule = generator(num_stages, num_microbatches)
    got = (schedule.num_stages, schedule.num_microbatches)
    if got != (num_stages, num_microbatches):
        raise ScheduleError(
            f"schedule {name!r}: its generator was asked for {num_stages} stages and {num_microbatches} micro-batches"
            f" and made {got[0]} and {got[1]}"
        )
    validate(schedule)
    return schedule


def _lookup(name: str) -> Generator:
    if name not in _GENERATORS:
        known = ", ".join(schedule_names())
        raise ScheduleError(f"schedule {name!r} is not known (known: {known}){nearest(str(name), _GENERATORS)}")
    return _GENERATORS[name]


@register_schedule("gpipe")
def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Fill-drain: all forwards, then all backwards (Huang et al., 2019). One rank a stage.

    Raises:
        ScheduleError: a count is not positive.

    >>> print(gpipe(1, 2).to_text().splitlines()[1])
    0F0,0F1,0B0,0B1,0STEP
    """
    return _one_rank_a_stage("gpipe", num_stages, num_microbatches, lambda _stage: num_microbatches)


@register_schedule("1f1b")
def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm-up, then one forward and one backward in turn, then cool-down (Narayanan et al., 2021). One rank a stage.

    Stage r of p starts with p - r - 1 forwards, so it never holds more than p - r micro-batches.

    Raises:
        ScheduleError: a count is not positive.

    >>> print(one_f_one_b(1, 2).to_text().splitlines()[1])
    0F0,0B0,0F1,0B1,0STEP
    """
    return _one_rank_a_stage("1f1b", num_stages, num_microbatches, lambda stage: num_stages - stage)


@register_schedule("eager-1f1b")
def eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, which hides the time that values spend on the way (Zhuang et al., 2023, eager-1F1B).

    A value that stage r sends and the gradient that comes back for it travel while the stage computes other
    micro-batches: it holds up to 2(p - r) - 1 of them, where 1F1B holds p - r. One rank a stage.

    Raises:
        ScheduleError: a count is not positive.

    >>> print(eager_one_f_one_b(2, 4).to_text(), end="")
    schedule eager-1f1b stages=2 microbatches=4 ranks=2
    0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3,0STEP
    1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,1STEP
    """
    return _one_rank_a_stage("eager-1f1b", num_stages, num_microbatches, lambda stage: 2 * (num_stages - stage) - 1)


def _one_rank_a_stage(
    name: str, num_stages: int, num_microbatches: int, max_in_flight: Callable[[int], int]
) -> Schedule:
    check_count("num_stages", num_stages)
    check_count("num_microbatches", num_microbatches)
    ranks = tuple(_forwards_ahead(stage, num_microbatches, max_in_flight(stage)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, ranks)


def _forwards_ahead(stage: int, num_microbatches: int, ahead: int) -> tuple[Action, ...]:
    """*ahead* forwards, then a backward and a forward in turn while there are forwards, then backwards; STEP."""
    actions = [Action(ActionKind.F, stage, microbatch) for microbatch in range(min(ahead, num_microbatches))]
    for microbatch in range(num_microbatches):
        actions.append(Action(ActionKind.B, stage, microbatch))
        if microbatch + ahead < num_microbatches:
            actions.append(Action(ActionKind.F, stage, microbatch + ahead))
    return (*actions, Action(ActionKind.STEP, stage))


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards alone, for evaluation and prediction. One rank a stage.

    Raises:
        ScheduleError: a count is not positive.

    >>> print(forward_only(1, 2).to_text().splitlines()[1])
    0F0,0F1
    """
    check_count("num_stages", num_stages)
    check_count("num_microbatches", num_microbatches)
    ranks = tuple(
        tuple(Action(ActionKind.F, stage, microbatch) for microbatch in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("forward_only", num_stages, num_microbatches, ranks)

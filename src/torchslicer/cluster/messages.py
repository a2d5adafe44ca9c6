"""Control messages between coordinator and workers: small, typed, JSON.

A run of one worker, seen on its control channel::

    worker -> coordinator     coordinator -> worker
    Hello                     Welcome | Refused
                              Assign, then its tensors
    Ready
                              Step | Evaluate | EndEpoch      (any number)
    Losses, Norms, Stepped    Scale
                              Settle
    Settled
                              Gather
    State, then its tensors
                              Release
    Released

`Heartbeat` goes both ways all the time; `Failed` and `Abort` end a run at any point.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from torchslicer.errors import ProtocolError

PROTOCOL = 1
"""Version of the control messages; both sides must have the same."""

Text = Annotated[str, Field(max_length=1024)]
LongText = Annotated[str, Field(max_length=1 << 16)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Small = Annotated[int, Field(ge=0, le=1 << 20)]


class Message(BaseModel):
    """Base of all messages: immutable, no unknown keys, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=True, ser_json_inf_nan="strings")


class Endpoint(Message):
    """Where a node takes data connections: ``tcp``, ``grpc`` or ``unix``, and the address."""

    transport: Literal["tcp", "grpc", "unix"]
    address: Text


class Hello(Message):
    """A worker introduces itself.

    ``instance`` tells it from others of the same name, ``process`` is the same for all workers in one process.
    """

    type: Literal["hello"] = "hello"
    protocol: Small
    version: Text
    torch_version: Text
    node: Text
    instance: Text = ""
    process: Text = ""
    host: Text
    device: Text
    cores: Small
    threads: Small = 0
    tags: list[Text] = Field(default_factory=list, max_length=64)
    endpoints: list[Endpoint] = Field(max_length=8)
    trusted: list[Text] = Field(default_factory=list, max_length=256)
    builders: list[Text] = Field(default_factory=list, max_length=256)


class Welcome(Message):
    """The coordinator takes a worker in."""

    type: Literal["welcome"] = "welcome"
    run_id: Text
    heartbeat_interval_s: float
    heartbeat_timeout_s: float


class Refused(Message):
    """The coordinator does not take a worker in."""

    type: Literal["refused"] = "refused"
    reason: LongText


class Peer(Message):
    """A rank as the others see it."""

    rank: Small
    node: Text
    host: Text
    endpoints: list[Endpoint] = Field(max_length=8)


class Assign(Message):
    """A worker's part of a run. The tensors named in ``tensors`` follow on the same channel, in that order."""

    type: Literal["assign"] = "assign"
    run_id: Text
    generation: Count
    rank: Small
    threads: Small
    secret: Text
    transport: Literal["tcp", "grpc"]
    peers: list[Peer] = Field(max_length=1024)
    links: list[Small] = Field(max_length=1024)
    stall_timeout_s: float
    description: dict[str, Any]
    tensors: list[Text] = Field(max_length=1 << 20)


class Ready(Message):
    """A worker holds its part and is linked to its peers."""

    type: Literal["ready"] = "ready"
    generation: Count
    threads: Small


class WorkInfo(Message):
    """One micro-batch, as far as every stage must know it; inputs and targets travel as frames."""

    share: float
    aux_share: float
    key: Annotated[int, Field(ge=0, lt=1 << 64)]
    position: Text = ""


class BatchInfo(Message):
    """One batch of a step: its number among all batches of the run, and its micro-batches."""

    pass_index: Count
    works: list[WorkInfo] = Field(max_length=1 << 16)


class Step(Message):
    """Run one optimizer step."""

    type: Literal["step"] = "step"
    generation: Count
    step: Count
    batches: list[BatchInfo] = Field(max_length=1 << 16)


class Evaluate(Message):
    """Run one batch in evaluation mode; the last stage sends the output back."""

    type: Literal["evaluate"] = "evaluate"
    generation: Count
    batch: BatchInfo


class EndEpoch(Message):
    """An epoch is over; its metrics are for schedulers that look at them."""

    type: Literal["end_epoch"] = "end_epoch"
    generation: Count
    metrics: dict[Text, float]


class Number(Message):
    """A tensor of one element, exactly: float32 fits a JSON number, and so does float64."""

    value: float
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"


class Losses(Message):
    """Losses that a rank has found: for each batch of the step and micro-batch, main ones and auxiliary ones."""

    type: Literal["losses"] = "losses"
    generation: Count
    step: Count
    batch: Small
    main: dict[str, Number]
    aux: dict[str, list[Number]]


class Norms(Message):
    """Gradient norms of the parameters that a rank owns."""

    type: Literal["norms"] = "norms"
    generation: Count
    step: Count
    norms: dict[Text, Number]


class Scale(Message):
    """The factor that brings the global gradient norm down to the limit."""

    type: Literal["scale"] = "scale"
    generation: Count
    step: Count
    coefficient: Number


class Stepped(Message):
    """A rank has updated its parameters."""

    type: Literal["stepped"] = "stepped"
    generation: Count
    step: Count


class Settle(Message):
    """Say when all that was asked for before is done."""

    type: Literal["settle"] = "settle"
    generation: Count


class Settled(Message):
    """All that was asked for before is done."""

    type: Literal["settled"] = "settled"
    generation: Count


class Gather(Message):
    """Send parameters and buffers back."""

    type: Literal["gather"] = "gather"
    generation: Count


class State(Message):
    """Parameters and buffers follow on the same channel, in this order."""

    type: Literal["state"] = "state"
    generation: Count
    tensors: list[Text] = Field(max_length=1 << 20)


class Release(Message):
    """The run is over; forget it and wait for the next."""

    type: Literal["release"] = "release"
    generation: Count


class Released(Message):
    """A worker has forgotten a run."""

    type: Literal["released"] = "released"
    generation: Count


class Shutdown(Message):
    """Exit."""

    type: Literal["shutdown"] = "shutdown"


class Heartbeat(Message):
    """Still here; a worker also says what it is doing."""

    type: Literal["heartbeat"] = "heartbeat"
    doing: Text = ""


class Failed(Message):
    """A worker could not go on with a run."""

    type: Literal["failed"] = "failed"
    generation: Count
    stage: int
    error: Text
    message: LongText
    traceback: LongText
    lost_peer: Small | None = None


class Abort(Message):
    """Give a run up."""

    type: Literal["abort"] = "abort"
    generation: Count
    reason: LongText


class Attach(Message):
    """First message on a data channel: who connects, for which run; ``secret`` is that of the run."""

    type: Literal["attach"] = "attach"
    run_id: Text
    generation: Count
    rank: int
    secret: Text


class Attached(Message):
    """A data channel was taken in."""

    type: Literal["attached"] = "attached"


class Reach(Message):
    """First message on a data channel that only finds out whether the node can be reached."""

    type: Literal["reach"] = "reach"
    run_id: Text


AnyMessage = Annotated[
    Hello
    | Welcome
    | Refused
    | Assign
    | Ready
    | Step
    | Evaluate
    | EndEpoch
    | Losses
    | Norms
    | Scale
    | Stepped
    | Settle
    | Settled
    | Gather
    | State
    | Release
    | Released
    | Shutdown
    | Heartbeat
    | Failed
    | Abort
    | Attach
    | Attached
    | Reach,
    Field(discriminator="type"),
]

_ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyMessage)


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return message.model_dump_json().encode()


def decode(data: bytes) -> Any:
    """Return the message that *data* holds.

    Raises:
        ProtocolError: It is not one.
    """
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"a control message is malformed at '{place}': {first['msg']}") from None

"""The sections of a :class:`~torchslicer.config.RunConfig`, with every key, its type and its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from torchslicer.config import fields
from torchslicer.config.problems import ALIASES, config_error, dotted, invalid, unknown_key
from torchslicer.errors import ConfigError


class Checked(BaseModel):
    """Settings that are checked when they are made and at every assignment.

    These classes never read the environment: a worker that is sent a configuration must not overlay its own.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, protected_namespaces=())

    section_path: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **data: Any) -> None:
        """Check and keep the given settings.

        Raises:
            ConfigError: A setting is unknown, impossible or contradictory.
        """
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise config_error(error, type(self), at=self.section_path) from None

    # Tells pydantic that nested settings need not go through this __init__, so it can still report their full path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Check plain data, as pydantic does, but raise :class:`ConfigError`."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise config_error(error, cls, at=cls.section_path) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Check and set one setting; a refused value leaves everything as it was."""
        if not (name.startswith("_") or name in type(self).model_fields or hasattr(type(self), name)):
            raise ConfigError(f"{dotted((*self.section_path, name))}: {unknown_key((name,), type(self))}")
        try:
            self._put(name, value)
        except ValidationError as error:
            raise config_error(error, type(self), at=self.section_path) from None

    def _put(self, name: str, value: Any) -> None:
        before, was_set = dict(self.__dict__), set(self.model_fields_set)
        try:
            super().__setattr__(name, value)
        except ValidationError:
            # pydantic has stored the value already when a check of the whole section refuses it
            self.__dict__.clear()
            self.__dict__.update(before)
            object.__setattr__(self, "__pydantic_fields_set__", was_set)
            raise


def assign(section: Checked, name: str, value: Any, *, argument: str) -> None:
    """Check and set one setting that came as the *argument* of a call: what is wrong with it is said of that name.

    Raises:
        ConfigError: The value is impossible, or contradicts another setting.

    >>> assign(PipelineSection(), "n_micro", 0, argument="num_microbatches")
    Traceback (most recent call last):
    torchslicer.errors.ConfigError: num_microbatches: expected greater than or equal to 1, got 0
    """
    try:
        section._put(name, value)
    except ValidationError as error:
        raise config_error(error, type(section), called={name: argument}) from None


def _default_optimizer() -> fields.NamedOptimizer:
    return {"name": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}}


def _default_criterion() -> fields.Named:
    return {"name": "CrossEntropyLoss", "params": {}}


class TrainingSection(Checked):
    """What is trained, and how."""

    section_path = ("training",)

    epochs: fields.Count = 10
    optimizer: fields.Optimizer = Field(default_factory=_default_optimizer)
    criterion: fields.Criterion = Field(default_factory=_default_criterion)
    mixed_precision: bool = False
    seed: fields.Seed = 0
    scheduler: fields.Scheduler | None = None
    max_grad_norm: fields.Positive | None = None
    accumulate: fields.Count = 1
    recompute: Literal["never", "except_last", "always"] = "never"
    batch_norm: Literal["per_microbatch", "deferred"] = "per_microbatch"
    target_key: fields.Name | None = None


class PipelineSection(Checked):
    """How the model is cut, and in which order its stages work. ``num_microbatches`` is another name of ``n_micro``."""

    section_path = ("pipeline",)

    use_gpipe: bool = False
    n_micro: fields.Count = 4
    schedule: fields.Name | None = None
    strategy: fields.Name = "uniform"
    cuts: fields.Names | None = None
    devices: fields.Devices | None = None

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step: ``n_micro``."""
        return self.n_micro

    @num_microbatches.setter
    def num_microbatches(self, value: int) -> None:
        self.n_micro = value

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        return one_spelling(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.use_gpipe and self.schedule is not None and self.schedule.lower() != "gpipe":
            text = f"use_gpipe: true contradicts schedule: {self.schedule}; remove one of them"
            raise invalid(text, key="schedule", show_value=False)
        if self.cuts is not None and self.strategy != "uniform":
            text = f"cuts contradicts strategy: {self.strategy}; a list of cuts leaves nothing to choose, remove one"
            raise invalid(text, key="cuts", show_value=False)
        return self


class DiscoverySection(Checked):
    """How the workers are found."""

    section_path = ("discovery",)

    backend: Literal["coordinator", "static"] = "coordinator"
    n_workers: fields.Count = 2
    timeout: fields.Positive = 60.0
    peers: fields.Addresses = Field(default_factory=list)
    tag_filter: fields.Names = Field(default_factory=list)
    registration_max_attempts: fields.Count = 30
    registration_delay_s: fields.PositiveOrZero = 3.0
    registration_rpc_timeout_s: fields.Positive = 5.0
    watchdog_interval_s: fields.Positive = 15.0


class StartupSection(Checked):
    """How the coordinator waits for workers that are still starting."""

    section_path = ("startup",)

    worker_init_max_attempts: fields.Count = 20
    worker_init_delay_s: fields.PositiveOrZero = 1.0
    worker_init_rpc_timeout_s: fields.Positive = 5.0


class CheckpointSection(Checked):
    """What is saved, where, and from where a run goes on."""

    section_path = ("checkpoint",)

    enabled: bool = False
    dir: fields.PathText = "./checkpoints"
    save_every: Literal["epoch", "never"] = "epoch"
    resume: fields.PathText | None = None


class LoggingSection(Checked):
    """The run folder and the level of messages."""

    section_path = ("logging",)

    enabled: bool = True
    dir: fields.PathText = "./runs"
    level: fields.Level = "INFO"


class ProfileSection(Checked):
    """What is measured: verbosity 0 nothing, 1 epochs, 2 phases, 3 batches."""

    section_path = ("profile",)

    verbosity: fields.Verbosity = 0
    memory: bool = False


class TransportSection(Checked):
    """What carries tensors between workers."""

    section_path = ("transport",)

    tensor: Literal["grpc", "tcp"] = "grpc"
    tensor_port_offset: fields.PortOffset = 1


class FaultToleranceSection(Checked):
    """How a lost worker is noticed, and how often it is replaced."""

    section_path = ("fault_tolerance",)

    enabled: bool = False
    heartbeat_interval_s: fields.Positive = 5.0
    ping_timeout_s: fields.Positive = 3.0
    max_retries: fields.CountOrZero = 3


class TlsSection(Checked):
    """Certificates of this process, as PEM files; without them a coordinator makes its own where it needs some."""

    section_path = ("network", "tls")

    ca: fields.PathText | None = None
    cert: fields.PathText | None = None
    key: fields.PathText | None = None
    names: fields.Names = Field(default_factory=list)

    @property
    def files(self) -> tuple[str, str, str] | None:
        """The files of the authority, the certificate and its key; None if there are none.

        Raises:
            ConfigError: Only some of them are given.
        """
        return self.files_of("network.tls")

    def files_of(self, called: str) -> tuple[str, str, str] | None:
        """Return ``files``; the error says what these settings are *called* where they were given.

        Raises:
            ConfigError: Only some of them are given.
        """
        given = {"ca": self.ca, "cert": self.cert, "key": self.key}
        missing = [name for name, path in given.items() if path is None]
        if len(missing) == len(given):
            return None
        if missing:
            raise ConfigError(
                f"{called}: expected the files ca, cert and key, {' and '.join(missing)} missing; "
                "`torchslicer certs init` makes all three"
            )
        return str(self.ca), str(self.cert), str(self.key)


class NetworkSection(Checked):
    """Addresses, certificates and the device of this process."""

    section_path = ("network",)

    device: fields.Device = "auto"
    coordinator_address: fields.Address | None = None
    coordinator_bind_address: fields.Address = "0.0.0.0:50054"
    worker_port: fields.Port = 50051
    worker_address: fields.WorkerAddress | None = None
    data_port: fields.DataPort | None = None
    worker_tags: fields.Names = Field(default_factory=list)
    keep_alive: bool = True
    tls: TlsSection = Field(default_factory=TlsSection)
    insecure: bool = False


def one_spelling(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename other spellings of keys to the names of the fields.

    >>> one_spelling({"num_microbatches": 8})
    {'n_micro': 8}
    """
    renamed = dict(data)
    for alias, name in ALIASES.items():
        if alias not in renamed:
            continue
        value = renamed.pop(alias)
        if renamed.setdefault(name, value) != value:
            raise invalid(f"{alias} and {name} are two names of one setting and differ", key=alias, show_value=False)
    return renamed

"""The settings of one run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from pydantic import Field, ValidationError, field_validator
from typing_extensions import Self

from torchslicer.config import fields, sections
from torchslicer.config.layers import Layers, add_environment, add_keywords, add_yaml
from torchslicer.config.problems import config_error
from torchslicer.config.yamlio import read_yaml, to_yaml_text

PathLike = str | os.PathLike[str]


class RunConfig(sections.Checked):
    """All settings of a run, in sections; every attribute can be assigned and is checked when it is.

    Settings come from Python keyword arguments, a YAML file and the environment
    (``TORCHSLICER_<SECTION>__<KEY>``); the first of these that gives a key decides it, else its default holds.

    >>> config = RunConfig.create(run_id="first", epochs=3, optimizer="adamw", lr=1e-3)
    >>> config.training.optimizer
    {'name': 'adamw', 'params': {'lr': 0.001}}
    >>> config.pipeline.n_micro = 8
    >>> config.pipeline.num_microbatches
    8
    """

    run_id: fields.RunId = Field(default_factory=fields.new_run_id)
    training: sections.TrainingSection = Field(default_factory=sections.TrainingSection)
    pipeline: sections.PipelineSection = Field(default_factory=sections.PipelineSection)
    discovery: sections.DiscoverySection = Field(default_factory=sections.DiscoverySection)
    startup: sections.StartupSection = Field(default_factory=sections.StartupSection)
    checkpoint: sections.CheckpointSection = Field(default_factory=sections.CheckpointSection)
    logging: sections.LoggingSection = Field(default_factory=sections.LoggingSection)
    profile: sections.ProfileSection = Field(default_factory=sections.ProfileSection)
    transport: sections.TransportSection = Field(default_factory=sections.TransportSection)
    fault_tolerance: sections.FaultToleranceSection = Field(default_factory=sections.FaultToleranceSection)
    network: sections.NetworkSection = Field(default_factory=sections.NetworkSection)

    @field_validator("run_id", mode="before")
    @classmethod
    def _generated(cls, value: object) -> object:
        return fields.new_run_id() if value is None else value

    @classmethod
    def load(cls, path: PathLike | None = None, *, config_path: PathLike | None = None, **overrides: Any) -> Self:
        """Merge keyword arguments, a YAML file, the environment and the defaults, in this order of precedence.

        Args:
            path: The YAML file. Without it, the file that the variable ``EXPERIMENT_CONFIG`` names, if any.
            config_path: Another name of *path*.
            **overrides: As for :meth:`create`.

        Raises:
            ConfigError: A setting is unknown, impossible or contradictory, or the file cannot be read.

        >>> RunConfig.load(epochs=2).training.epochs
        2
        """
        path = path or config_path or os.environ.get("EXPERIMENT_CONFIG", "").strip() or None
        layers = Layers()
        add_environment(layers, cls, os.environ)
        if path is not None:
            add_yaml(layers, cls, read_yaml(Path(path)))
        add_keywords(layers, cls, overrides)
        return cls._check(layers)

    @classmethod
    def from_yaml(cls, path: PathLike) -> Self:
        """Read a YAML file over the defaults; the environment is not read.

        Raises:
            ConfigError: As for :meth:`load`.
        """
        layers = Layers()
        add_yaml(layers, cls, read_yaml(Path(path)))
        return cls._check(layers)

    @classmethod
    def from_env(cls) -> Self:
        """Read the environment over the defaults.

        Raises:
            ConfigError: As for :meth:`load`.
        """
        layers = Layers()
        add_environment(layers, cls, os.environ)
        return cls._check(layers)

    @classmethod
    def create(cls, **settings: Any) -> Self:
        """Set keys by keyword over the defaults; neither files nor the environment are read.

        Args:
            **settings: ``run_id``, any key of the sections training, pipeline and network by its own name,
                ``lr`` (a parameter of the optimizer), ``n_workers``, ``transport`` (of tensors); any other key as
                ``section__key=value`` or ``section={...}``. None means not given.

        Raises:
            ConfigError: As for :meth:`load`.

        >>> RunConfig.create(logging__level="debug").logging.level
        'DEBUG'
        """
        layers = Layers()
        add_keywords(layers, cls, settings)
        return cls._check(layers)

    @classmethod
    def _check(cls, layers: Layers) -> Self:
        try:
            checked = cls.__pydantic_validator__.validate_python(layers.nested())
        except ValidationError as error:
            raise config_error(error, cls, where=layers.where) from None
        return cast("Self", checked)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain data: a copy."""
        return self.model_dump()

    def to_yaml_text(self) -> str:
        """Return all settings as YAML; :meth:`from_yaml` makes an equal configuration of it."""
        return to_yaml_text(self.to_dict())

    def to_yaml(self, path: PathLike) -> None:
        """Write all settings to a YAML file.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(self.to_yaml_text(), encoding="utf-8")

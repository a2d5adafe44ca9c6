"""What users call: `slice` and the `SlicedModel` that it returns."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchslicer.callbacks import CallbackList, Metrics, TrainingCallback
from torchslicer.config import RunConfig
from torchslicer.cutting import CutRequest, Cutter, built, check_shared, on_device_of, sample_of
from torchslicer.errors import ConfigError, DataError
from torchslicer.executors.base import Cut, Executor
from torchslicer.executors.local import LocalExecutor
from torchslicer.executors.released import check_weights, recover, state_names
from torchslicer.graph.model import ModelGraph
from torchslicer.metrics import MetricSpec, check_metrics
from torchslicer.observers import observers, warn_about_modes
from torchslicer.partition import Plan
from torchslicer.pipeline.batch import BatchReader, batches_of
from torchslicer.pipeline.criterion import Criterion, build_criterion
from torchslicer.pipeline.microbatch import merge_outputs, split_batch
from torchslicer.pipeline.options import TrainingOptions
from torchslicer.settings import TrainSettings, build_options, check_model, names_checked, note_names, resolve_config
from torchslicer.trainer import Run, Trainer, evaluate

logger = logging.getLogger("torchslicer")


@names_checked("slice")
def slice(  # noqa: A001 - the public name of the library's main function
    model: nn.Module | str,
    strategy: Any = "uniform",
    n: int | None = None,
    executor: Executor | None = None,
    pack: Any = None,
    *,
    cuts: Sequence[str] | None = None,
    example: Any = None,
    criterion: Any = None,
    devices: Sequence[str] | None = None,
    verify: bool = True,
    builder_args: Mapping[str, Any] | None = None,
    run_config: RunConfig | None = None,
) -> SlicedModel:
    """Cut *model* into *n* stages.

    Args:
        model: Any `nn.Module`. It stays yours: training works on its own parameters. Or the name of a function or class
            that makes one, ``"my_package.models:make"``: it is built here, and workers of a `DistributedExecutor`
            build it themselves, if they allow it (``--allow-builder``), so that only weights travel.
        strategy: ``"uniform"``, ``"parameters"``, ``"memory"``, ``"time"`` (needs *example*), a registered name, or a
            callable ``(graph, n) -> first units of stages 1..n-1``.
        n: Number of stages, 2 by default; exactly as many non-empty ones are made.
        executor: What runs the stages; by default they run in this process.
        pack: ``(model) -> list of modules``, for models that cannot be traced; the list is taken as it is.
        cuts: Names of modules; a cut falls just before each. Leaves nothing for *strategy* to choose.
        example: Inputs (or a batch) like those to come. Lets `torch.export` have a try, verification happen now, and
            costs be measured; for *strategy* ``"time"`` best of the size of a micro-batch.
        criterion: As in ``train``. Lets the time of the loss count when *strategy* ``"time"`` measures *example*, which
            then is a batch with its target; the loss belongs to the last stage.
        devices: One device for all stages, or one a stage; by default where the model is.
        verify: Compare graph and model on a batch (*example*, else the first of ``train``) before anything is trained.
        builder_args: Keyword arguments of that function: numbers, texts, truth values, lists and dictionaries of them.
        run_config: Where *n*, *strategy*, *cuts* and *devices* come from if they are not given.

    Returns:
        The sliced model.

    Raises:
        SliceError: The model cannot be cut like that; the message says why and what would help.
        ConfigError: A strategy, device or keyword is unknown.
        ShippingError: *model* is a name that leads nowhere, or that no worker could call.

    Example:
        >>> import torchslicer as ts
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> len(ts.slice(model, n=3).plan.stages)
        3
    """
    module, builder = built(model, builder_args, pack)
    if run_config is not None:
        pipeline = run_config.pipeline
        n = n if n is not None or pipeline.cuts else run_config.discovery.n_workers
        strategy = pipeline.strategy if strategy == "uniform" else strategy
        cuts = cuts if cuts is not None else pipeline.cuts
        devices = devices if devices is not None else pipeline.devices
    names = tuple(cuts) if cuts is not None else None
    loss = None if criterion is None else build_criterion(criterion)
    request = CutRequest(strategy, n, names, pack, tuple(devices or ()), verify, builder, loss)
    return SlicedModel(module, Cutter(module, request, example), executor or LocalExecutor())


class SlicedModel:
    """A model cut into stages. Make one with `torchslicer.slice`.

    Attributes:
        model: The module that was cut.
        executor: What runs the stages.
    """

    def __init__(self, model: nn.Module, cutter: Cutter, executor: Executor) -> None:
        self.model = model
        self.executor = executor
        self._cutter = cutter
        self._options: TrainingOptions | None = None
        self._target_key: str | None = None
        self._is_training = False

    @property
    def plan(self) -> Plan:
        """Where the model is cut: pure data, printable, JSON round trip."""
        return self._cutter.plan

    @property
    def graph(self) -> ModelGraph:
        """The model as units (in training mode)."""
        return self._cutter.graphs.training

    def __str__(self) -> str:
        return str(self.plan)

    def __repr__(self) -> str:
        return f"<SlicedModel {self.plan.model}: {self.plan.num_stages} stages, {type(self.executor).__name__}>"

    @names_checked("train")
    def train(
        self,
        loader: Iterable[Any],
        optimizer: Any = None,
        criterion: Any = None,
        *,
        epochs: int | None = None,
        verbose: bool = False,
        run_config: RunConfig | None = None,
        callbacks: Sequence[TrainingCallback] | None = (),
        mixed_precision: bool | None = None,
        use_gpipe: bool | None = None,
        n_micro_batches: int | None = None,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        accumulate: int | None = None,
        recompute: str | None = None,
        batch_norm: str | None = None,
        seed: int | None = None,
        eval_loader: Iterable[Any] | None = None,
        metrics: MetricSpec = None,
        target_key: str | None = None,
        shared_inputs: Sequence[str] = (),
        run_dir: str | Path | bool | None = None,
    ) -> list[Metrics]:
        """Train the model end to end; afterwards ``model`` holds the trained weights.

        What is given here beats *run_config*, which beats the defaults.

        Args:
            loader: Yields batches: ``(x, y)``, lists, dictionaries with the labels inside, several inputs.
            optimizer: ``{"name": "SGD", "params": {"lr": 0.1}}``, a name, or a factory ``(parameters) -> Optimizer``.
                ``params["groups"]`` sets options by parameter name pattern.
            criterion: ``{"name": ..., "params": ...}``, a name, a module, or a callable ``(output, target) -> loss``.
            epochs: Passes over the data.
            verbose: Show a progress bar an epoch.
            run_config: The configuration to start from.
            callbacks: `TrainingCallback` instances.
            mixed_precision: bfloat16 autocast; weights, optimizer state and loss stay float32.
            use_gpipe: GPipe micro-batches, as many as *n_micro_batches* says.
            n_micro_batches: Pieces of a batch; ``num_microbatches`` is another name for it.
            num_microbatches: The same.
            schedule: ``"gpipe"``, ``"1f1b"``, ``"eager-1f1b"`` or a registered one.
            scheduler: ``{"name": "StepLR", "params": {...}, "interval": "epoch" | "step"}`` or a factory.
            max_grad_norm: Clip gradients by their norm over all stages.
            accumulate: Batches in one optimizer step.
            recompute: Activation checkpointing: ``"never"``, ``"except_last"`` or ``"always"``; the bits are the same.
            batch_norm: ``"per_microbatch"`` or ``"deferred"``: when running statistics are updated.
            seed: Of dropout and the like.
            eval_loader: Evaluated after each epoch; results are in the history as ``eval_...``.
            metrics: For *eval_loader*: names (``"accuracy"``), or ``{name: function(output, target)}``.
            target_key: Where dictionaries hold the target.
            shared_inputs: Names of inputs that have no batch dimension and go to every micro-batch whole.
            run_dir: Where the run's files go; False for none.

        Returns:
            One dictionary an epoch: epoch (from 1), loss (mean over samples), samples, duration_s, samples_per_s, lr.

        Raises:
            ConfigError: A setting is unknown, impossible or contradictory. Nothing has been started.
            DataError: A batch has a form that cannot be used.
            VerificationError: The graph does not compute what the model computes.
            RunError: A stage or callback failed, or the loss is not finite.

        Example:
            >>> import torchslicer as ts
            >>> sliced = ts.slice(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), n=2)
            >>> batches = [(torch.ones(6, 4), torch.zeros(6, dtype=torch.long))]
            >>> history = sliced.train(
            ...     batches, {"name": "SGD", "params": {"lr": 0.1}}, "cross_entropy", epochs=2, run_dir=False
            ... )
            >>> history[1]["loss"] < history[0]["loss"]
            True
        """
        self._check_weights()
        settings = TrainSettings(
            epochs, mixed_precision, use_gpipe, n_micro_batches, num_microbatches, schedule, scheduler, max_grad_norm,
            accumulate, recompute, batch_norm, seed, target_key,
        )  # fmt: skip
        config = resolve_config(settings, run_config)
        config.network.insecure = self.executor.insecure
        note_names(config, optimizer, criterion, has_config=run_config is not None)
        options = build_options(
            config,
            optimizer=optimizer,
            criterion=criterion,
            scheduler=scheduler,
            num_stages=self.plan.num_stages,
            shared_inputs=tuple(shared_inputs),
        )
        check_model(self.model, options)
        check_metrics(metrics, eval_loader)
        hooks = CallbackList(callbacks or ())
        self._options, self._target_key = options, config.training.target_key
        run = Run(
            run_id=config.run_id,
            config=config.to_dict(),
            epochs=config.training.epochs,
            loader=loader,
            first_epoch=self._look_at_first_batch(loader, options),
            reader=self._reader(),
            eval_loader=eval_loader,
            metrics=metrics,
        )
        warn_about_modes(self.model, options)
        with self._exclusive(), observers(config, run_dir, loader, options, verbose=verbose) as bus:
            return Trainer(self.executor, self._cutter.cut, options, hooks, bus).fit(run)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._is_training:
            raise ConfigError("train: this sliced model is being trained already; wait for that run to end")
        if self.executor.busy:
            raise ConfigError(
                "train: the executor runs another model; wait for that run to end, or use another executor"
            )
        self._is_training = True
        try:
            yield
        finally:
            self._is_training = False

    def _current_cut(self) -> Cut:
        """The cut, made again if the model has changed since; during training the trainer looks after it."""
        if not self._is_training:
            self._cutter.renew()
        return self._cutter.cut

    def _look_at_first_batch(self, loader: Iterable[Any], options: TrainingOptions) -> Any:
        """Read the first batch, let the cut be checked on it, and return an iterator that still has it."""
        iterator = iter(loader)
        raw = list(itertools.islice(iterator, 1))
        if not raw:
            raise DataError(
                "the loader gave no batch; is the dataset empty, smaller than the batch size with drop_last=True, or "
                "an iterator that was used up?"
            )
        batch = self._reader().read(raw[0])
        check_shared(options.shared_inputs, batch)
        sample = sample_of(split_batch(batch, options.num_microbatches, options.shared_inputs)[0], options)
        self._cutter.look_at(on_device_of(self._cutter.model, sample.inputs))
        return itertools.chain(raw, iterator)

    def _reader(self) -> BatchReader:
        return self._cutter.reader(self._target_key)

    @names_checked("evaluate")
    def evaluate(
        self, loader: Iterable[Any], criterion: Any = None, metrics: MetricSpec = None, *, target_key: str | None = None
    ) -> dict[str, float]:
        """Return the loss and *metrics* over *loader*, in evaluation mode; nothing of the model's state changes.

        Args:
            loader: Yields batches as for `train`.
            criterion: By default that of the last `train`.
            metrics: Names (``"accuracy"``), or ``{name: function(output, target)}``, or torchmetrics-like objects.
            target_key: Where dictionaries hold the target.

        Raises:
            ConfigError: There is nothing to compute, or a name is unknown.
            DataError: The loader is empty, or a batch has a form that cannot be used.
        """
        self._check_weights()
        built = build_criterion(criterion) if criterion is not None else self._last_criterion()
        if built is None and not metrics:
            raise ConfigError("evaluate: give a criterion or metrics; the model has not been trained with one yet")
        if target_key is not None:
            self._target_key = target_key
        values, _ = evaluate(
            self.executor, self._cutter.cut, loader, self._reader(), criterion=built, metrics=metrics,
            mixed_precision=self._mixed_precision(),
        )  # fmt: skip
        return values

    @names_checked("predict")
    def predict(self, loader: Iterable[Any], *, concatenate: bool = True) -> Any:
        """Return the model's outputs for *loader*, in its order, in evaluation mode and without gradients.

        Targets in the batches are ignored. With *concatenate*, batches are joined along the first dimension where
        shapes allow; otherwise (and always where they do not) a list of the batches' outputs is returned.

        Raises:
            DataError: The loader is empty, or a batch has a form that cannot be used.
        """
        self._check_weights()
        cut = self._current_cut()
        outputs = [
            self.executor.forward(
                cut,
                self._reader().read_inputs(raw),
                criterion=None,
                mixed_precision=self._mixed_precision(),
            ).output
            for raw in batches_of(loader)
        ]
        if not outputs:
            raise DataError("the loader to predict on gave no batch")
        return merge_outputs(outputs) if concatenate else outputs

    @names_checked("gradients")
    def gradients(
        self, batch: Any, criterion: Any, *, num_microbatches: int = 1, schedule: str = "gpipe", seed: int = 0
    ) -> tuple[float, dict[str, torch.Tensor | None]]:
        """Return the loss of one batch and the gradient of every parameter, without updating anything.

        Buffers are updated as in a step of training. What it is for: comparing with the unsplit model.
        """
        self._check_weights()
        config = resolve_config(TrainSettings(num_microbatches=num_microbatches, schedule=schedule, seed=seed), None)
        options = build_options(
            config, optimizer="SGD", criterion=criterion, scheduler=None, num_stages=self.plan.num_stages
        )
        self._look_at_first_batch([batch], options)
        executor = LocalExecutor()
        executor.setup(self._cutter.cut, options)
        try:
            return executor.gradients([self._reader().read(batch)], 0)
        finally:
            executor.teardown()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers under the names they have in the model that was cut, on the CPU.

        While workers train it (in a callback), they are fetched from there.

        Raises:
            RunError: The weights were released to workers, and the run that had them has failed.
        """
        there = self.executor.current_state(self._cutter.cut) or {}
        named = state_names(self.model, self.graph)
        found = self.model.state_dict(keep_vars=True)
        return {key: there.get(named[key], tensor).detach().cpu() for key, tensor in found.items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load what `state_dict` (or the unsplit model's) returned; also into a model whose weights a run has lost.

        Raises:
            ConfigError: With *strict*, if names are missing or unexpected; also if a shape differs, or if weights that
                a run has lost are not among them.
        """
        if not self._is_training:
            recover(self.model, self.graph, state_dict)
        try:
            self.model.load_state_dict(state_dict, strict=strict)
        except RuntimeError as error:
            raise ConfigError(f"load_state_dict: {error}") from error

    def merge(self, device: str | torch.device | None = None) -> nn.Module:
        """Return the trained module, on one device (by default the one of the first stage).

        Raises:
            RunError: The weights were released to workers, and the run that had them has failed.
        """
        self._check_weights()
        return self.model.to(device or self.plan.stages[0].device)

    def _check_weights(self) -> None:
        """Refuse to go on with weights that are not here."""
        if not self._is_training:
            check_weights(self.graph)

    def _last_criterion(self) -> Criterion | None:
        return None if self._options is None else self._options.criterion

    def _mixed_precision(self) -> bool:
        return self._options is not None and self._options.mixed_precision

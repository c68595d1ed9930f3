"""Training and prediction loops whose stages overlap: `progress(iterator)`, one batch a call.

Staleness 0 trains exactly as a plain loop does (forward, backward, step, batch by batch) and
overlaps what does not depend on the previous update: loading, dedup, the exchange of ids and
the owners' probe (Monolith's `enable_pipelined_fwda2a`), and gradients on their way while the
dense part steps (`enable_pipelined_bwda2a`). Staleness k also fetches the rows of the next k
windows before the update of the present one: rows are stale by exactly k updates (Monolith's
`embedding_prefetch_capacity` = k; `enable_async_optimize` and AsyncPushHook, which push one
step late and drain at the end, are k = 1). An eviction waits for its window, and a snapshot point
for everything under way, at every staleness. In one process there is no exchange to hide: rows
are read in forward, and are never stale.

Losses are means over the rank's batch. Each is weighed by what the batch weighs in its window
over all ranks, so that uneven batches give the gradient of the whole window's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shoal.comm.collectives import Collectives, LocalCollectives
from shoal.comm.consensus import require_same
from shoal.embedding.collection import EmbeddingCollection
from shoal.errors import ConfigError, InputError, of_kind
from shoal.pipeline import batches
from shoal.pipeline.executor import Executor, Round
from shoal.pipeline.scheduler import Settings
from shoal.pipeline.stages import Losses, Stages, Step
from shoal.ragged import KeyedRagged


class RunHook(Protocol):
    """Called by a training loop: once with the model before the first step, then after each."""

    def begin(self, module: nn.Module) -> None:
        """Before the first step."""
        ...

    def after_step(self, step: int) -> None:
        """After step number `step`, which counts from 1."""
        ...


class TrainPipeline:
    """Trains one batch a call while it prepares the next ones; see `create_train_pipeline`.

    Attributes:
        hooks: called before the first step and after each.
        last: the batch that the last `progress` trained, with its weight and whether its window
            is applied; None before the first.
        on_snapshot: called on every rank at a snapshot point with the number of batches of this
            run trained so far. No ticket is open then and every trained window is applied: the time
            to save.
        evict_due_s: when the next eviction is due, as of the last snapshot point; None: the first
            batches settle it.
    """

    _what = "train"

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        settings: Settings,
        *,
        device: torch.device | str | None,
        control: Collectives | None,
        snapshot_before: Callable[[int], bool] | None = None,
        evict_due_s: int | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._device = device
        self._control = control
        self._executor_over = partial(
            Executor, settings, stages, snapshot_before=snapshot_before, evict_due_s=evict_due_s
        )
        self._source: Iterator[Any] | None = None
        self._executor: Executor | None = None
        self._attached = True
        self._snapshot_asked = False
        self.on_snapshot: Callable[[int], None] | None = None
        self.evict_due_s: int | None = None
        self.last: Round | None = None
        self.hooks: Sequence[RunHook] = ()
        self._steps = -1  # nothing has begun

    def __reduce_ex__(self, protocol: Any) -> Any:
        got, remedy = "pickle, torch.save or deepcopy", "Copy the model, then make a pipeline."
        allowed = "one in its own process: it holds threads and open batches"
        raise ConfigError("copy of a pipeline", got=got, allowed=allowed, remedy=remedy)

    def progress(self, iterator: Iterator[Any]) -> Step:
        """Train one batch.

        Args:
            iterator: this rank's batches; the same object until StopIteration. A thread reads it
                ahead.

        Returns:
            (losses, predictions) of the batch, without a graph. On a rank whose data has ended
            while others continue: zeros, and None for predictions, so that all ranks come back
            equally often.

        Raises:
            StopIteration: the data has ended; on all ranks in the same call. The next call starts
                over with another iterator.
            InputError: another iterator in the midst of a run.
            DataError: a rank could not load its batch; there, what its iterator raised.
            CollectiveFailed: a rank died or did not come in time.
        """
        if not self._attached:
            self.attach()
        self._check_mode()
        if self._steps < 0:
            self._steps = 0
            for hook in self.hooks:
                hook.begin(self._model)
        executor = self._executor_for(iterator)
        executor.on_snapshot = self.on_snapshot
        try:
            done = executor.round()
        except StopIteration as error:  # the end of the data is None
            self.close()
            raise RuntimeError("a stage of the pipeline raised StopIteration") from error
        except BaseException:
            self.close()
            raise
        self.evict_due_s = executor.evict_due_s
        if done is None:
            self._executor = self._source = None
            raise StopIteration
        self.last = done
        if done.applied:
            self._steps += 1
            for hook in self.hooks:
                hook.after_step(self._steps)
        return done.step

    def request_snapshot(self) -> None:
        """Ask all ranks for a snapshot point before the next window that has not begun.

        One rank's asking is enough. Batches under way are trained first; then `on_snapshot` is
        called on every rank. A request in a run's last batches may come too late: nothing is under
        way once `progress` has raised StopIteration.
        """
        if self._executor is None:
            self._snapshot_asked = True
        else:
            self._executor.ask_snapshot()

    @property
    def tickets(self) -> int:
        """Batches under way whose rows are held."""
        return 0 if self._executor is None else self._executor.tickets

    def detach(self) -> nn.Module:
        """The model, for use without the pipeline; batches under way stay.

        The model is not changed by a pipeline, so this is for symmetry with TorchRec's: `progress`
        attaches it again.
        """
        self._attached = False
        return self._model

    def attach(self, model: nn.Module | None = None) -> None:
        """Take the model back.

        Raises:
            ConfigError: it is another model.
        """
        if model is not None and model is not self._model:
            raise ConfigError(
                "model to attach",
                got="another model than the pipeline was made for",
                allowed="the same model",
                remedy=f"Make another pipeline: create_{self._what}_pipeline(model, ...).",
            )
        self._attached = True

    def close(self) -> None:
        """Give up the run: batches under way are forgotten. The same on all ranks."""
        executor, self._executor, self._source = self._executor, None, None
        if executor is not None:
            executor.close()

    def _check_mode(self) -> None:
        if not self._model.training:
            raise ConfigError(
                "model of a training pipeline",
                got="a model in eval()",
                allowed="a model in train()",
                remedy="Call model.train(), or use create_predict_pipeline.",
            )

    def _executor_for(self, iterator: Iterator[Any]) -> Executor:
        if self._executor is None:
            control = _control_of(self._model) if self._control is None else self._control
            # Ranks whose pipelines differ would wait for each other in vain.
            remedy = "Make the pipeline from the same configuration on each rank."
            require_same(control, "settings of a pipeline", repr(self._settings), remedy=remedy)
            device = _device_of(self._model) if self._device is None else self._device
            # "cuda" alone has no number, and threads want one.
            device = torch.empty(0, device=device).device
            self._executor = self._executor_over(control, device, iter(iterator))
            self._source = iterator
            if self._snapshot_asked:
                self._executor.ask_snapshot()
            self._snapshot_asked = False
        elif iterator is not self._source:
            raise InputError(
                f"iterator of a {self._what} pipeline",
                got="another one while batches of the first are under way",
                allowed="the same iterator until StopIteration",
                remedy="Call iter(loader) once a pass; close() gives a run up.",
            )
        return self._executor


class PredictPipeline(TrainPipeline):
    """Predicts one batch a call while the next ones load; see `create_predict_pipeline`."""

    _what = "predict"

    def progress(self, iterator: Iterator[Any]) -> Any:
        """What the model gives for the next batch; nothing is inserted or changed.

        A rank whose data has ended runs empty batches until all ranks' has, then raises
        StopIteration; the call after the last batch may therefore take a while.

        Raises:
            StopIteration, InputError, DataError, CollectiveFailed: as `TrainPipeline.progress`.
        """
        while True:
            step = super().progress(iterator)
            if self.last is not None and self.last.batch is not None:
                return step.predictions

    def _check_mode(self) -> None:
        if self._model.training:
            raise ConfigError(
                "model of a predict pipeline",
                got="a model in train()",
                allowed="a model in eval()",
                remedy="Call model.eval().",
            )


def create_train_pipeline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    check_all_workers_data_status: bool = False,
    *,
    staleness: int = 0,
    accumulation: int = 1,
    execute_all_batches: bool = True,
    loss_of: Callable[[Any, Any], Losses] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    depth: int | None = None,
    evict_every_s: int | None = None,
    ids_of: Callable[[Any], KeyedRagged | Mapping[str, KeyedRagged]] = batches.ids_of,
    weight_of: Callable[[Any], float] = batches.weight_of,
    event_time_of: Callable[[Any], int] = batches.event_time_of,
    step: Callable[[], None] | None = None,
    device: torch.device | str | None = None,
    control: Collectives | None = None,
    snapshot_before: Callable[[int], bool] | None = None,
    evict_due_s: int | None = None,
    hooks: Sequence[RunHook] = (),
) -> TrainPipeline:
    """A pipeline that trains `model`; TorchEasyRec's function of this name, made exact.

    What overlaps, and what losses weigh: see this module's docstring.

    Args:
        model: in train(); called with a batch, on `device`.
        optimizer: dense and sparse; see `shoal.optim.JointOptimizer`.
        check_all_workers_data_status: all ranks stop as soon as one is out of data; what others
            have loaded is dropped, and counted in a log line. False: all continue until every rank
            is out; ranks without data run empty batches of weight 0, so nothing hangs.
        staleness: updates by which a row may be stale.
        accumulation: batches of one optimizer step, a window; the last one may be short.
        execute_all_batches: at the end, batches under way are trained; False drops them, and then
            the end is when any rank's data ends.
        loss_of: losses from (what the model gave, batch); None: the model gives
            (losses, predictions).
        scaler: of losses under mixed precision.
        depth: most batches in flight; None takes what all stages need.
        evict_every_s: evict expired rows once event time has advanced this far; None: never.
        ids_of: what collections read of a batch; by their name in the model, or one for all.
        weight_of: what a batch's mean loss weighs: the sum of its `weights`, or its examples.
        event_time_of: a batch's event time in whole seconds: its `event_time_s`.
        step: one optimizer step, clipping for example, and zero_grad; None: the plain one.
        device: where batches go; None: where the tables or parameters are.
        control: collectives between the hosts of all ranks; None: the model's mesh, or one rank.
        snapshot_before: whether a snapshot point comes before the batch of that number in its run,
            from 0; asked once of each, a few batches ahead. Unlike `request_snapshot` it is exact.
        evict_due_s: event time of the first eviction, to continue from another pipeline;
            see `TrainPipeline.evict_due_s`.
        hooks: called before the first step and after each.

    Raises:
        ConfigError: a setting out of range, or several ranks without a control group.
    """
    settings = Settings(
        staleness=staleness,
        accumulation=accumulation,
        depth=depth,
        stop_at_first=check_all_workers_data_status or not execute_all_batches,
        drain=execute_all_batches,
        evict_every_s=evict_every_s,
    )
    stages = Stages(
        model,
        of_kind("optimizer", optimizer, torch.optim.Optimizer),
        loss_of=loss_of,
        scaler=scaler,
        ids_of=ids_of,
        weight_of=weight_of,
        event_time_of=event_time_of,
        step=step,
    )
    pipeline = TrainPipeline(
        model,
        stages,
        settings,
        device=device,
        control=control,
        snapshot_before=snapshot_before,
        evict_due_s=evict_due_s,
    )
    pipeline.hooks = tuple(of_kind("hooks", hooks, Iterable))
    return pipeline


def create_predict_pipeline(
    model: nn.Module,
    *,
    depth: int = 2,
    device: torch.device | str | None = None,
    control: Collectives | None = None,
) -> PredictPipeline:
    """A pipeline that predicts: batches load ahead, and uneven ranks never hang.

    Args:
        model: in eval(); called with a batch. What it gives is what `progress` returns.
        depth: most batches in flight.
        device, control: as for `create_train_pipeline`.
    """
    settings = Settings(depth=depth)
    return PredictPipeline(model, Stages(model), settings, device=device, control=control)


def _collections(model: nn.Module) -> list[EmbeddingCollection]:
    return [part for part in model.modules() if isinstance(part, EmbeddingCollection)]


def _device_of(model: nn.Module) -> torch.device:
    for collection in _collections(model):
        return collection.shard.device
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _control_of(model: nn.Module) -> Collectives:
    mesh = getattr(model, "mesh", None)
    if mesh is not None:
        control: Collectives = mesh.control
        return control
    if any(collection.distributed for collection in _collections(model)):
        raise ConfigError(
            "control group of a pipeline",
            got="none, for tables that are spread over ranks",
            allowed="collectives between the hosts",
            remedy="Pass control=shoal.comm.init().control.",
        )
    return LocalCollectives()

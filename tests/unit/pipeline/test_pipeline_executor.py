"""Pipelines of one process: staleness 0 is a plain loop bit for bit, k applies k windows late."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collectives import LocalCollectives
from shoal.data.batch import Batch
from shoal.errors import ConfigError, InputError, ShapeError
from shoal.optim import clip_grad_norm_
from shoal.pipeline import Settings, Step, create_predict_pipeline, create_train_pipeline
from shoal.pipeline.batches import event_time_of, weight_of
from shoal.pipeline.executor import Executor
from shoal.rules.admission import Admission
from shoal.rules.optimizers import SGD, Adam
from shoal.table.spec import TableSpec
from support.pipeline_runs import (
    Toy,
    batches_of,
    late_losses,
    loss_of,
    plain_losses,
    rows_of,
    spec,
    toy,
)

CASES: dict[str, tuple[TableSpec, ...]] = {
    "plain": (spec(),),
    "two tables": (spec("t", optimizer=Adam(lr=0.05)), spec("u", optimizer=SGD(lr=0.3))),
    "admission": (spec(admission=Admission(threshold=3)),),
    "expiry": (spec(ttl_s=25),),
    "admission and expiry": (spec(ttl_s=15, admission=Admission(threshold=2)),),
    "lru": (spec(capacity_rows=36, on_full="lru"),),
    "lfu": (spec(capacity_rows=36, on_full="lfu", ttl_s=25, admission=Admission(threshold=2)),),
    "bfloat16": (spec(dtype="bfloat16"),),
    "float64": (spec(dtype="float64"),),
}


def run(pipeline: Any, batches: Sequence[Batch]) -> list[Tensor]:
    source, losses = iter(batches), []
    with contextlib.suppress(StopIteration):
        while True:
            losses.append(pipeline.progress(source).losses)
    return losses


def assert_same_rows(left: Toy, right: Toy) -> None:
    for ours, theirs in zip(rows_of(left), rows_of(right), strict=True):
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
    assert torch.equal(left.linear.weight, right.linear.weight)


class TestStaleness0:
    @pytest.mark.parametrize("depth", [None, 9])
    @pytest.mark.parametrize("accumulation", [1, 3])
    @pytest.mark.parametrize("case", CASES)
    def test_equals_a_plain_loop(self, case: str, accumulation: int, depth: int | None) -> None:
        budget = "lru" in case or "lfu" in case
        batches = batches_of(16, ids=90 if budget else 30)
        tables = CASES[case]
        if budget and accumulation == 1:
            # Not enough for the rows of two batches.
            tables = (replace(tables[0], capacity_rows=16),)
        plain, piped = toy(tables), toy(tables)
        expected = plain_losses(plain, batches, accumulation=accumulation, evict_every_s=20)
        pipeline = create_train_pipeline(
            piped.model,
            piped.optimizer,
            loss_of=loss_of,
            accumulation=accumulation,
            evict_every_s=20,
            depth=depth,
        )
        assert torch.equal(torch.stack(run(pipeline, batches)), torch.stack(expected))
        assert_same_rows(piped.model, plain.model)
        assert pipeline.tickets == 0
        (stats, *_) = plain.model.tables.shard.stats()
        assert stats.evicted > 0 or (CASES[case][0].expiry is None and not budget)

    @pytest.mark.gpu
    @pytest.mark.parametrize("case", ["plain", "lru"])
    def test_equals_it_on_a_gpu(self, case: str) -> None:
        batches = batches_of(16, ids=90)
        plain, piped = toy(CASES[case], device="cuda"), toy(CASES[case], device="cuda")
        expected = plain_losses(plain, [batch.to("cuda") for batch in batches])
        pipeline = create_train_pipeline(piped.model, piped.optimizer, loss_of=loss_of)
        assert torch.equal(torch.stack(run(pipeline, batches)), torch.stack(expected))
        assert_same_rows(piped.model, plain.model)

    def test_equals_it_under_a_scaler_and_clipping(self) -> None:
        batches = batches_of(8)
        results = []
        for piped in (False, True):
            made = toy([spec()])
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

            def step(made: Any = made, scaler: torch.amp.GradScaler = scaler) -> None:
                scaler.unscale_(made.optimizer)
                sparse = made.optimizer.optimizers[0]
                clip_grad_norm_(made.model.linear.parameters(), sparse, 0.05)
                scaler.step(made.optimizer)
                scaler.update()
                made.optimizer.zero_grad()

            if piped:
                pipeline = create_train_pipeline(
                    made.model, made.optimizer, loss_of=loss_of, scaler=scaler, step=step
                )
                run(pipeline, batches)
            else:
                for batch in batches:
                    scaler.scale(loss_of(made.model(batch), batch)).backward()
                    step()
            results.append(made.model)
        assert_same_rows(*results)

    def test_uneven_batches_of_a_window_weigh_by_their_examples(self) -> None:
        batches = [*batches_of(1, examples=2), *batches_of(1, seed=1, examples=7)]
        plain, piped = toy([spec()]), toy([spec()])
        plain_losses(plain, batches, accumulation=2)
        pipeline = create_train_pipeline(
            piped.model, piped.optimizer, loss_of=loss_of, accumulation=2
        )
        run(pipeline, batches)
        assert_same_rows(piped.model, plain.model)


class Snapshots:
    """Reads rows when they are fetched, as an exchange between processes does."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self._read: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def fetch(self, route: Any, *, ctx: Any) -> None:
        self._read[id(route)] = (route, self._exchange.combine(route, ctx=ctx))

    def combine(self, route: Any, *, ctx: Any) -> Any:
        kept = self._read.pop(id(route), None)
        return self._exchange.combine(route, ctx=ctx) if kept is None else kept[1]


class TestStalenessK:
    @pytest.mark.parametrize("accumulation", [1, 2])
    @pytest.mark.parametrize("staleness", [1, 2])
    @pytest.mark.parametrize("case", ["plain", "admission and expiry", "lru"])
    def test_equals_a_loop_that_reads_k_windows_early(
        self, case: str, staleness: int, accumulation: int
    ) -> None:
        batches = batches_of(21, examples=2, ids=60 if case == "lru" else 20)
        plain, piped = toy(CASES[case]), toy(CASES[case])
        expected = late_losses(plain, batches, staleness, accumulation, 20)
        piped.model.tables.distribute(Snapshots(piped.model.tables.exchange))
        pipeline = create_train_pipeline(
            piped.model,
            piped.optimizer,
            loss_of=loss_of,
            staleness=staleness,
            accumulation=accumulation,
            evict_every_s=20,
            control=LocalCollectives(),
        )
        assert torch.equal(torch.stack(run(pipeline, batches)), torch.stack(expected))
        assert_same_rows(piped.model, plain.model)

    def test_staleness_0_reads_late(self) -> None:
        batches = batches_of(9)
        plain, piped = toy([spec()]), toy([spec()])
        expected = plain_losses(plain, batches)
        piped.model.tables.distribute(Snapshots(piped.model.tables.exchange))
        pipeline = create_train_pipeline(
            piped.model, piped.optimizer, loss_of=loss_of, control=LocalCollectives()
        )
        assert torch.equal(torch.stack(run(pipeline, batches)), torch.stack(expected))


class TestRuns:
    def test_passes_go_on_from_each_other(self) -> None:
        batches = batches_of(5)
        plain, piped = toy([spec()]), toy([spec()])
        plain_losses(plain, batches * 2)
        pipeline = create_train_pipeline(piped.model, piped.optimizer, loss_of=loss_of)
        assert len(run(pipeline, batches)) == len(run(pipeline, batches)) == 5
        assert run(pipeline, []) == []
        assert_same_rows(piped.model, plain.model)

    def test_gives_losses_and_predictions(self) -> None:
        made = toy([spec()])

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.toy = made.model

            def forward(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
                logits_B = self.toy(batch)
                loss = loss_of(logits_B, batch)
                return {"main": loss, "extra": loss * 0.5}, logits_B

        pipeline = create_train_pipeline(Whole(), made.optimizer)
        (batch,) = batches_of(1)
        losses, predictions = pipeline.progress(iter([batch]))
        assert set(losses) == {"main", "extra"} and predictions.shape == (4,)
        assert not predictions.requires_grad
        assert pipeline.last is not None and pipeline.last.applied
        assert torch.equal(pipeline.last.batch.labels, batch.labels)

    def test_a_cut_holds_no_ticket(self) -> None:
        batches = batches_of(8)
        made, plain = toy([spec()]), toy([spec()])
        pipeline = create_train_pipeline(made.model, made.optimizer, loss_of=loss_of)
        snapshots: list[int] = []

        def on_snapshot(trained: int) -> None:
            assert pipeline.tickets == 0
            made.model.tables.shard.clear(0)  # refused while a ticket is live
            snapshots.append(trained)

        pipeline.on_snapshot = on_snapshot
        source = iter(batches)
        pipeline.progress(source)
        pipeline.request_snapshot()
        assert pipeline.tickets == 1
        run(pipeline, source)  # type: ignore[arg-type]
        assert len(snapshots) == 1 and 1 < snapshots[0] < 8
        plain_losses(plain, batches[: snapshots[0]])
        plain.model.tables.shard.clear(0)
        plain_losses(plain, batches[snapshots[0] :])
        assert_same_rows(made.model, plain.model)

    def test_without_execute_all_batches_what_is_under_way_is_dropped(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        made = toy([spec()])
        pipeline = create_train_pipeline(
            made.model, made.optimizer, loss_of=loss_of, execute_all_batches=False
        )
        with caplog.at_level(logging.WARNING):
            losses = run(pipeline, batches_of(8))
        assert len(losses) < 8
        assert f"{8 - len(losses)} batches dropped" in caplog.text
        made.model.tables.shard.clear(0)

    def test_what_a_source_raises_is_raised_in_its_turn(self) -> None:
        def source() -> Iterator[Batch]:
            yield from batches_of(6)
            raise KeyError("gone")

        made = toy([spec()])
        pipeline = create_train_pipeline(made.model, made.optimizer, loss_of=loss_of)
        with pytest.raises(KeyError, match="gone"):
            run(pipeline, source())  # type: ignore[arg-type]
        assert len(run(pipeline, batches_of(2))) == 2

    def test_another_iterator_in_the_midst_is_refused(self) -> None:
        made = toy([spec()])
        pipeline = create_train_pipeline(made.model, made.optimizer, loss_of=loss_of)
        pipeline.progress(iter(batches_of(3)))
        with pytest.raises(InputError, match="iter\\(loader\\) once"):
            pipeline.progress(iter(batches_of(3)))
        pipeline.close()
        assert len(run(pipeline, batches_of(3))) == 3

    @pytest.mark.parametrize("closed", [True, False])
    def test_a_pipeline_given_up_holds_no_rows_and_disturbs_no_other(self, closed: bool) -> None:
        made = toy([spec()])
        first, second = (
            create_train_pipeline(made.model, made.optimizer, loss_of=loss_of) for _ in range(2)
        )
        source = iter(batches_of(9))
        first.progress(iter(batches_of(9)))
        second.progress(source)
        if closed:
            first.close()
        del first
        second.progress(source)
        assert second.tickets == 1
        if closed:
            second.close()
        del second
        gc.collect()
        made.model.tables.shard.clear(0)  # refused while a ticket is live

    @pytest.mark.parametrize("loss", [lambda logits_B, _: logits_B, lambda *_: 1.0])
    def test_a_loss_is_one_number(self, loss: Any) -> None:
        made = toy([spec()])
        pipeline = create_train_pipeline(made.model, made.optimizer, loss_of=loss)
        with pytest.raises(ShapeError, match="loss of a training pipeline"):
            pipeline.progress(iter(batches_of(3)))
        made.model.tables.shard.clear(0)  # refused while a ticket is live

    def test_a_model_may_leave_out_a_lookup(self) -> None:
        made = toy([spec()])

        made.model.forward = lambda batch: batch.labels  # type: ignore[method-assign]
        pipeline = create_train_pipeline(
            made.model, made.optimizer, loss_of=lambda *_: made.model.linear.bias.sum(), depth=1
        )
        source = iter(batches_of(4))
        for _ in range(3):
            pipeline.progress(source)
            made.model.tables.shard.clear(0)  # refused while a ticket is live

    def test_detach_gives_the_model_back(self) -> None:
        made = toy([spec()])
        pipeline = create_train_pipeline(made.model, made.optimizer, loss_of=loss_of)
        source = iter(batches_of(5))
        pipeline.progress(source)
        model = pipeline.detach().eval()
        with torch.no_grad():
            model(batches_of(1, seed=9)[0])
        model.train()
        pipeline.attach(model)
        assert len(run(pipeline, source)) == 4  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="another model"):
            pipeline.attach(nn.Linear(1, 1))

    def test_modes_are_checked(self) -> None:
        made = toy([spec()])
        with pytest.raises(ConfigError, match=r"model\.eval"):
            create_predict_pipeline(made.model).progress(iter([]))
        pipeline = create_train_pipeline(made.model.eval(), made.optimizer, loss_of=loss_of)
        with pytest.raises(ConfigError, match=r"model\.train"):
            pipeline.progress(iter([]))

    def test_predicts_what_the_model_gives(self) -> None:
        made = toy([spec()])
        batches = batches_of(5)
        plain_losses(made, batches)
        model = made.model.eval()
        pipeline, source = create_predict_pipeline(model), iter(batches)
        for batch in batches:
            with torch.no_grad():
                assert torch.equal(pipeline.progress(source), model(batch))
        with pytest.raises(StopIteration):
            pipeline.progress(source)


class Recorder:
    """Writes down what is called."""

    weight_of, event_time_of = staticmethod(weight_of), staticmethod(event_time_of)

    def __init__(self, room: int = 1 << 30) -> None:
        self.calls: list[str] = []
        self.left = room

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            self.calls.append(f"{name} {args[0]}" if args else name)
            return Step(torch.zeros(()), None)

        return call

    def incoming(self, batch: Any) -> tuple[int, ...]:
        return (10,)

    def room(self) -> tuple[int, ...]:
        return (self.left,)


def recorded(room: int) -> list[str]:
    stages = Recorder(room)
    executor = Executor(Settings(), stages, LocalCollectives(), torch.device("cpu"), iter([1, 2]))
    while executor.round() is not None:
        pass
    return [call for call in stages.calls if call != "drop"]


def test_stages_are_called_in_the_schedulers_order() -> None:
    assert recorded(1 << 30) == [
        *("begin 1", "probe 1", "fetch 1", "begin 2", "probe 2"),
        *("forward 1", "backward 1.0", "apply", "fetch 2", "forward 2", "backward 1.0", "apply"),
    ]


def test_a_table_near_its_budget_defers_inserts() -> None:
    assert recorded(5) == [
        *("begin 1", "probe 1", "fetch 1", "begin 2"),
        *("forward 1", "backward 1.0", "apply", "probe 2", "fetch 2"),
        *("forward 2", "backward 1.0", "apply"),
    ]


def test_a_model_that_stops_an_iteration_does_not_end_the_data() -> None:
    made = toy([spec()])
    pipeline = create_train_pipeline(
        made.model, made.optimizer, loss_of=lambda outputs, batch: next(iter(()))
    )
    with pytest.raises(RuntimeError, match="StopIteration"):
        pipeline.progress(iter(batches_of(3)))
    assert pipeline.tickets == 0


class CountingHook:
    def __init__(self) -> None:
        self.begun: list[nn.Module] = []
        self.steps: list[int] = []

    def begin(self, module: nn.Module) -> None:
        assert not self.steps
        self.begun.append(module)

    def after_step(self, step: int) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("staleness", [0, 2])
def test_hooks_are_called_before_the_first_step_and_after_each(staleness: int) -> None:
    made, hook = toy((spec(),)), CountingHook()
    pipeline = create_train_pipeline(
        made.model,
        made.optimizer,
        loss_of=loss_of,
        accumulation=3,
        staleness=staleness,
        hooks=[hook],
    )
    run(pipeline, batches_of(7))
    assert hook.steps == [1, 2, 3]  # the last window is short
    run(pipeline, batches_of(3))
    assert (hook.begun, hook.steps) == ([made.model], [1, 2, 3, 4])

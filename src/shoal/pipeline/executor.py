"""Runs what the scheduler says, on threads and streams, in one fixed order."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.comm.collectives import Collectives, Pending
from shoal.comm.consensus import rank_rows
from shoal.pipeline import batches, scheduler
from shoal.pipeline.batches import Prefetcher, Reading
from shoal.pipeline.scheduler import Command, Facts, Settings, State
from shoal.pipeline.stages import Stages, Step
from shoal.pipeline.voting import Ballot, Tally

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Round:
    """One trained batch.

    Args:
        index: of the batch in its run.
        step: what it gave.
        batch: the batch, on the device; None on a rank whose data has ended.
        weight: of this rank's batch.
        applied: whether its window is applied.
    """

    index: int
    step: Step
    batch: Any
    weight: float
    applied: bool = False


class Executor:
    """One run over one source.

    Args:
        settings: what may overlap; when the run ends and evicts.
        stages: what each command does.
        control: collectives between the hosts of all ranks.
        device: where batches go.
        source: this rank's batches.
        snapshot_before: whether a snapshot point is to come before the batch of a number (before
            the next window, if it is in the midst of one); one rank's wish is enough.
        evict_due_s: event time of the first eviction, where an earlier run has settled it.

    Attributes:
        on_snapshot: called at every snapshot point with the number of batches trained; no ticket
            is open then.
    """

    def __init__(
        self,
        settings: Settings,
        stages: Stages,
        control: Collectives,
        device: torch.device,
        source: Iterator[Any],
        *,
        snapshot_before: Callable[[int], bool] | None = None,
        evict_due_s: int | None = None,
    ) -> None:
        self._settings = settings
        self._stages = stages
        self._control = control
        self._device = device
        self._snapshot_before = snapshot_before
        self._tally = Tally(settings, evict_due_s)
        self.on_snapshot: Callable[[int], None] | None = None
        self.evict_due_s = evict_due_s
        # Early stages have a stream of their own; but one rank's lookup has no exchange to hide,
        # and its shard is busy in forward.
        self._early: torch.cuda.Stream | None = None
        streams: tuple[torch.cuda.Stream, ...] = ()
        if device.type == "cuda":
            streams = (torch.cuda.current_stream(device),)
            if control.world_size > 1:
                self._early = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                streams = (*streams, self._early)
        self._loader = Prefetcher(source, device, stages.weight_of, streams)
        self._slots: dict[int, Reading] = {}
        # Also where it is dropped before the end of its data: rows must not be held for good.
        self._forget = weakref.finalize(self, _drop_all, stages, self._slots)
        self._forget.atexit = False
        self._cast: dict[int, tuple[Pending, int]] = {}
        # What a rank without data trains on: its first batch, or another rank's, without ids.
        self._empty: Any = None
        self._snapshot_asked = False
        self._dropped = 0
        self._forwarded: Round | None = None
        self._round: Round | None = None
        self._state = State(settings)
        self._follow(scheduler.start(settings))

    @property
    def tickets(self) -> int:
        """Batches whose rows are held."""
        return self._state.tickets

    def ask_snapshot(self) -> None:
        """Ask for a snapshot point as soon as may be; one rank's asking is enough."""
        self._snapshot_asked = True

    def close(self) -> None:
        """End the loading thread; batches in flight are forgotten, their tickets end."""
        self._loader.close()
        self._forget()

    def round(self) -> Round | None:
        """Continue until one batch is trained, with the step of its window; None at the end.

        Raises:
            DataError: a rank could not load its batch; there, what its source raised.
        """
        self._round = None
        while not self._state.stopped and not self._is_over():
            command = self._state.running
            if command is None:
                self._take_loaded()
            else:
                facts: Facts | None = getattr(self, f"_{command.action}")(command)
                self._follow(scheduler.done(self._state, facts))
        return self._round

    def _is_over(self) -> bool:
        """Whether a batch is trained and its window is done with."""
        command = self._state.running
        after = command is not None and command.action in ("apply", "evict", "snapshot")
        return self._round is not None and not after

    def _follow(self, state: State) -> None:
        """Take the next state; batches that are to be loaded by now are asked for."""
        for index in range(self._state.loads, state.loads):
            self._loader.ask(index)
        self._state = state

    def _take_loaded(self) -> None:
        reading = self._loader.take()
        self._slots[reading.index] = reading
        if reading.found and self._empty is None:
            self._empty = batches.emptied(reading.batch)
        self._follow(scheduler.loaded(self._state, reading.found))

    def _batch(self, index: int) -> Any:
        """The batch to run a stage with: this rank's, or one without ids."""
        slot = self._slots.get(index)
        if slot is None or not slot.found:
            # A new object each time: lookups go by the identity of their batch.
            empty = batches.emptied(self._empty)
            slot = self._slots[index] = Reading(index, True, empty, idle=True)
        return slot.batch

    def _vote(self, command: Command) -> None:
        reading = self._slots.get(command.index) or Reading(command.index, False)
        wants_snapshot = self._snapshot_before is not None and self._snapshot_before(command.index)
        room = self._stages.room()
        ballot = Ballot(
            found=reading.found,
            failed=reading.error is not None,
            weight=reading.weight,
            event_time_s=self._stages.event_time_of(reading.batch) if reading.found else 0,
            snapshot=self._snapshot_asked or wants_snapshot,
            incoming=self._stages.incoming(reading.batch) if reading.found else (0,) * len(room),
            room=room,
        )
        self._snapshot_asked = False
        self._control.step = self._state.applied
        what = f"vote on batch {command.index}"
        pending = rank_rows(self._control, ballot.numbers(), what=what)
        self._cast[command.index] = (pending, self._state.probed)

    def _settle(self, command: Command) -> Facts:
        pending, probed = self._cast.pop(command.index)
        (every_WX,) = pending.wait()
        ballots = [Ballot.of(row) for row in every_WX.tolist()]
        slot = self._slots.get(command.index)
        if slot is not None and slot.error is not None:
            raise slot.error
        facts = self._tally.settle(ballots, probed)
        if command.index == 0 and facts.train:
            self._wait(None if slot is None else slot.sent)
            self._share_empty([ballot.found for ballot in ballots])
        return facts

    def _share_empty(self, found: list[bool]) -> None:
        """Give ranks whose data ended before it began a batch of another rank's, without ids."""
        if not any(found) or all(found):
            return
        given = None
        if self._control.rank == found.index(True):
            given = batches.moved(self._empty, torch.device("cpu"), wait=True)
        every = self._control.gather_objects(given, what="empty batch for ranks without data")
        if self._empty is None:
            given = next(one for one in every if one is not None)
            self._empty = batches.emptied(batches.moved(given, self._device))

    def _wait(self, event: torch.cuda.Event | None) -> None:
        """Let the present stream wait for a point in another."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _on_early_stream(self) -> AbstractContextManager[Any]:
        """Run on the early stream, after all that the main stream was given."""
        if self._early is None:
            return nullcontext()
        self._early.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._early)

    def _join_early_stream(self) -> None:
        """Let the main stream wait for all early stages."""
        if self._early is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._early)

    def _begin(self, command: Command) -> None:
        batch = self._batch(command.index)
        with self._on_early_stream():
            self._wait(self._slots[command.index].sent)
            self._stages.begin(batch)

    def _probe(self, command: Command) -> None:
        with self._on_early_stream():
            self._stages.probe(self._batch(command.index))

    def _fetch(self, command: Command) -> None:
        with self._on_early_stream():
            self._stages.fetch(self._batch(command.index))
        if self._early is not None:
            self._slots[command.index].fetched = self._early.record_event()

    def _forward(self, command: Command) -> None:
        slot = self._slots[command.index]
        self._wait(slot.sent)
        self._wait(slot.fetched)
        step = self._stages.forward(
            slot.batch, last=self._ends_window(command.index), idle=slot.idle
        )
        if slot.idle:
            step = Step(batches.zeroed(step.losses), None)
        batch = None if slot.idle else slot.batch
        self._forwarded = Round(command.index, step, batch, slot.weight)

    def _backward(self, command: Command) -> None:
        size = self._settings.accumulation
        first = command.index // size * size
        stop = first + size if self._state.end is None else min(first + size, self._state.end)
        total = self._tally.weight(first, stop)
        own = self._slots[command.index].weight
        # Gradients are averaged over ranks.
        share = own / total * self._control.world_size if total else 0.0
        self._stages.backward(share, last=self._ends_window(command.index))
        del self._slots[command.index]
        self._round, self._forwarded = self._forwarded, None

    def _ends_window(self, index: int) -> bool:
        return (index + 1) % self._settings.accumulation == 0 or index + 1 == self._state.end

    def _apply(self, command: Command) -> None:
        self._join_early_stream()
        self._stages.apply()
        if self._round is not None:
            self._round = replace(self._round, applied=True)

    def _evict(self, command: Command) -> None:
        self._join_early_stream()
        if command.evict_s is not None:
            self._stages.evict(command.evict_s)

    def _snapshot(self, command: Command) -> None:
        self._join_early_stream()
        self.evict_due_s = self._tally.due_s(command.index)
        if self.on_snapshot is not None:
            self.on_snapshot(command.index)

    def _drop(self, command: Command) -> None:
        slot = self._slots.pop(command.index)
        self._dropped += slot.found
        _drop_all(self._stages, {command.index: slot})

    def _stop(self, command: Command) -> None:
        self.close()
        if self._dropped:
            _log.warning(
                "rank %d: %d batches dropped, since the data of some rank ended after %d",
                self._control.rank,
                self._dropped,
                command.index,
            )


def _drop_all(stages: Stages, slots: dict[int, Reading]) -> None:
    """Forget batches in flight; what training has of their rows by now stays."""
    while slots:
        _, slot = slots.popitem()
        if slot.found:
            stages.drop(slot.batch)

"""Runs what the scheduler says, on threads and streams, in one fixed order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.comm.collectives import Pending
from shoal.pipeline import batches
from shoal.pipeline.batches import Loader, Reading
from shoal.pipeline.scheduler import Command, Done, Event, Loaded, Settings, Settled, advance, start
from shoal.pipeline.stages import Stages, Step
from shoal.pipeline.voting import Ballot, Ballots, Rules, Tally


class Lanes:
    """The streams of a run.

    device: where batches go.
    beside: early stages run on a stream of their own; only on CUDA.
    """

    def __init__(self, device: torch.device, *, beside: bool) -> None:
        self.device = device
        self._early: torch.cuda.Stream | None = None
        if beside and device.type == "cuda":
            self._early = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """All that read batches."""
        if self.device.type != "cuda":
            return ()
        main = torch.cuda.current_stream(self.device)
        return (main,) if self._early is None else (main, self._early)

    def early(self) -> AbstractContextManager[Any]:
        """Run on the early stream, after all that the main stream was given."""
        if self._early is None:
            return nullcontext()
        self._early.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._early)

    def mark(self) -> torch.cuda.Event | None:
        """A point in the early stream."""
        return None if self._early is None else self._early.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the present stream wait for a point in another."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def join(self) -> None:
        """Let the main stream wait for all early stages."""
        if self._early is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._early)


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asking:
    """What a batch is asked.

    Args:
        weight: of its mean loss.
        event_time_s: whole seconds.
        emptied: the same batch without ids, for ranks without data.
    """

    weight: Callable[[Any], float] = batches.weight_of
    event_time_s: Callable[[Any], int] = batches.event_time_of
    emptied: Callable[[Any], Any] = batches.emptied


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


@dataclass(slots=True)
class _Slot:
    """A batch in flight."""

    reading: Reading
    idle: bool = False
    fetched: torch.cuda.Event | None = None


class _Templates:
    """What a rank without data trains on: its first batch, or another rank's, without ids."""

    def __init__(self, emptied: Callable[[Any], Any], device: torch.device) -> None:
        self._emptied = emptied
        self._device = device
        self._kept: Any = None

    def saw(self, batch: Any) -> None:
        """Keep the first batch, emptied."""
        if self._kept is None:
            self._kept = self._emptied(batch)

    def share(self, ballots: Ballots, found: list[bool]) -> None:
        """Give ranks whose data ended before it began a batch of another rank's."""
        if not any(found) or all(found):
            return
        host = torch.device("cpu")
        giver = ballots.rank == found.index(True)
        given = batches.moved(self._kept, host, wait=True) if giver else None
        given = ballots.first_of(given, what="empty batch for ranks without data")
        self.saw(batches.moved(given, self._device))

    def take(self) -> Any:
        """An empty batch, a new object each time: lookups go by the identity of their batch."""
        return self._emptied(self._kept)


class Executor:
    """One run over one source.

    Args:
        settings, rules: what may overlap; when the run ends and evicts.
        stages: what each command does.
        ballots: votes of the ranks.
        lanes: streams.
        source: this rank's batches.
        asking: what batches are asked.
        on_cut: called at every cut with the number of batches trained; no ticket is open then.
        cut_before: whether a cut is to come before the batch of a number (before the next window,
            if it is in the midst of one); one rank's wish is enough.
        evict_due_s: event time of the first eviction, where an earlier run has settled it.
    """

    def __init__(
        self,
        settings: Settings,
        rules: Rules,
        stages: Stages,
        ballots: Ballots,
        lanes: Lanes,
        source: Iterator[Any],
        *,
        asking: Asking | None = None,
        on_cut: Callable[[int], None] | None = None,
        cut_before: Callable[[int], bool] | None = None,
        evict_due_s: int | None = None,
    ) -> None:
        self._settings = settings
        self._stages = stages
        self._ballots = ballots
        self._lanes = lanes
        self._asking = Asking() if asking is None else asking
        self.on_cut = on_cut
        self._cut_before = cut_before
        self._tally = Tally(rules, evict_due_s)
        self.evict_due_s = evict_due_s
        self._loader = Loader(source, lanes.device, self._asking.weight, lanes.streams)
        self._slots: dict[int, _Slot] = {}
        self._cast: dict[int, tuple[Pending, int]] = {}
        self._templates = _Templates(self._asking.emptied, lanes.device)
        self._cut_asked = False
        self._dropped = 0
        self._forwarded: Round | None = None
        self._round: Round | None = None
        self._state, commands = start(settings)
        self._following = self._sorted(commands)

    @property
    def tickets(self) -> int:
        """Batches whose rows are held."""
        return self._state.tickets

    @property
    def trained(self) -> int:
        """Batches trained."""
        return self._state.trained

    @property
    def stopped(self) -> bool:
        """Whether the run is over."""
        return self._state.stopped

    def ask_cut(self) -> None:
        """Ask for a cut as soon as may be; one rank's asking is enough."""
        self._cut_asked = True

    def close(self) -> None:
        """End the loading thread; batches in flight are forgotten, their tickets end."""
        self._loader.close()
        self._slots.clear()
        self._stages.drop()

    def round(self) -> Round | None:
        """Go on until one batch is trained, with the step of its window; None at the end.

        Raises:
            DataError: a rank could not load its batch; there, what its source raised.
        """
        self._round = None
        while not self._state.stopped:
            following = self._following
            if self._is_over(following):
                break
            if following is None:
                self._take_loaded()
            else:
                self._following = None
                self._happened(self._run(following))
        return self._round

    def _is_over(self, following: Command | None) -> bool:
        """Whether a batch is trained and its window is done with."""
        if self._round is None:
            return False
        return following is None or following.verb not in ("apply", "evict", "cut")

    def _sorted(self, commands: tuple[Command, ...]) -> Command | None:
        """Hand loads to their thread; at most one other command is out."""
        other = None
        for command in commands:
            if command.verb == "load":
                self._loader.ask(command.index)
            else:
                other = command
        return other

    def _happened(self, event: Event) -> None:
        self._state, commands = advance(self._state, event)
        other = self._sorted(commands)
        if other is not None:
            self._following = other

    def _take_loaded(self) -> None:
        reading = self._loader.take()
        self._slots[reading.index] = _Slot(reading)
        if reading.found:
            self._templates.saw(reading.batch)
        self._happened(Loaded(reading.index, reading.found))

    def _run(self, command: Command) -> Event:
        if command.verb == "settle":
            return self._settle(command.index)
        act = _ACTS.get(command.verb)
        if act is not None:
            act(self, command)
        return Done(command)

    def _batch(self, index: int) -> Any:
        """The batch to run a stage with: this rank's, or one without ids."""
        slot = self._slots.get(index)
        if slot is None or not slot.reading.found:
            empty = Reading(index, True, self._templates.take())
            slot = self._slots[index] = _Slot(empty, idle=True)
        return slot.reading.batch

    def _vote(self, command: Command) -> None:
        slot = self._slots.get(command.index)
        reading = Reading(command.index, False) if slot is None else slot.reading
        ballot = Ballot(
            found=reading.found,
            failed=reading.error is not None,
            weight=reading.weight,
            event_time_s=self._asking.event_time_s(reading.batch) if reading.found else 0,
            cut=self._cut_asked or self._wants_cut(command.index),
            room=self._stages.room(),
        )
        none = (0,) * len(ballot.room)
        incoming = self._stages.incoming(reading.batch) if reading.found else none
        self._cut_asked = False
        ballot = replace(ballot, incoming=incoming)
        pending = self._ballots.begin(ballot, command.index, self._state.applied)
        self._cast[command.index] = (pending, self._state.probed)

    def _wants_cut(self, index: int) -> bool:
        return self._cut_before is not None and self._cut_before(index)

    def _settle(self, index: int) -> Settled:
        pending, probed = self._cast.pop(index)
        ballots = self._ballots.read(pending)
        slot = self._slots.get(index)
        if slot is not None and slot.reading.error is not None:
            raise slot.reading.error
        facts = self._tally.settle(ballots, probed)
        if index == 0 and facts.train:
            self._lanes.wait(None if slot is None else slot.reading.sent)
            self._templates.share(self._ballots, [ballot.found for ballot in ballots])
        return Settled(index, facts)

    def _begin(self, command: Command) -> None:
        batch = self._batch(command.index)
        with self._lanes.early():
            self._lanes.wait(self._slots[command.index].reading.sent)
            self._stages.begin(batch)

    def _probe(self, command: Command) -> None:
        with self._lanes.early():
            self._stages.probe(self._batch(command.index))

    def _fetch(self, command: Command) -> None:
        with self._lanes.early():
            self._stages.fetch(self._batch(command.index))
        self._slots[command.index].fetched = self._lanes.mark()

    def _forward(self, command: Command) -> None:
        slot = self._slots[command.index]
        self._lanes.wait(slot.reading.sent)
        self._lanes.wait(slot.fetched)
        step = self._stages.forward(
            slot.reading.batch, last=self._ends_window(command.index), idle=slot.idle
        )
        if slot.idle:
            step = Step(batches.zeroed(step.losses), None)
        batch = None if slot.idle else slot.reading.batch
        self._forwarded = Round(command.index, step, batch, slot.reading.weight)

    def _backward(self, command: Command) -> None:
        size = self._settings.accumulation
        first = command.index // size * size
        stop = first + size if self._state.end is None else min(first + size, self._state.end)
        total = self._tally.weight(first, stop)
        own = self._slots[command.index].reading.weight
        # Gradients are averaged over ranks.
        share = own / total * self._ballots.world_size if total else 0.0
        self._stages.backward(share, last=self._ends_window(command.index))
        del self._slots[command.index]
        self._round, self._forwarded = self._forwarded, None

    def _ends_window(self, index: int) -> bool:
        return (index + 1) % self._settings.accumulation == 0 or index + 1 == self._state.end

    def _apply(self, command: Command) -> None:
        self._lanes.join()
        self._stages.apply()
        if self._round is not None:
            self._round = replace(self._round, applied=True)

    def _evict(self, command: Command) -> None:
        self._lanes.join()
        if command.evict_s is not None:
            self._stages.evict(command.evict_s)

    def _cut(self, command: Command) -> None:
        self._lanes.join()
        self.evict_due_s = self._tally.due_s(command.index)
        if self.on_cut is not None:
            self.on_cut(command.index)

    def _drop(self, index: int) -> None:
        slot = self._slots.pop(index)
        self._dropped += slot.reading.found
        self._stages.drop()

    def _stop(self, command: Command) -> None:
        self.close()
        if self._dropped:
            _log.warning(
                "rank %d: %d batches dropped, since the data of some rank ended after %d",
                self._ballots.rank,
                self._dropped,
                command.index,
            )


_ACTS: dict[str, Callable[[Executor, Command], None]] = {
    "vote": Executor._vote,
    "begin": Executor._begin,
    "probe": Executor._probe,
    "fetch": Executor._fetch,
    "forward": Executor._forward,
    "backward": Executor._backward,
    "apply": Executor._apply,
    "evict": Executor._evict,
    "cut": Executor._cut,
    "drop": lambda executor, command: executor._drop(command.index),
    "stop": Executor._stop,
}

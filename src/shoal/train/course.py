"""How far a run is: what a checkpoint holds beside models, so that training goes on alike."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.telemetry import Telemetry
from shoal.train.learner import Learner
from shoal.train.ranks import ALONE, Ranks
from shoal.train.summary import Recorder

_COUNTED = ("examples", "ids")


class Course:
    """The place of a run in its data, its clocks, metrics and random numbers.

    Args:
        learners: all models of the run.
        telemetry: counters "steps", "examples" and "ids" of this rank.
        stride: examples, over all ranks, between two points of the curves.
        ranks: who trains together.
        seed: of the run, for ranks that go on without random numbers of their own.

    Attributes:
        recorder: metrics and curves.
        position: global samples that all steps so far have consumed.
        next_point: examples at which the next point of the curves is due.
        evict_due_s: event time of the next eviction; None: the first batches settle it.
        trained_s: seconds that training had taken before it went on, or in all once it has ended.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        telemetry: Telemetry,
        *,
        stride: int,
        ranks: Ranks = ALONE,
        seed: int = 0,
    ) -> None:
        self._learners = tuple(learners)
        self._ranks = ranks
        self._seed = seed
        self._began_s: float | None = None
        self.telemetry = telemetry
        self.recorder = Recorder([learner.name for learner in learners], ranks)
        self.position = 0
        self.next_point = stride
        self.evict_due_s: int | None = None
        self.trained_s = 0.0

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._learners[0].steps

    def started(self) -> None:
        """Training begins, or goes on."""
        self._began_s = time.perf_counter()

    def ended(self) -> None:
        """Training has ended."""
        self.trained_s, self._began_s = self.train_s, None

    @property
    def train_s(self) -> float:
        """Seconds of training, of all processes that took it up, until now."""
        if self._began_s is None:
            return self.trained_s
        return self.trained_s + time.perf_counter() - self._began_s

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What to save, as (the same on every rank, this rank's own); a collective call."""
        counted = [float(self.telemetry.counter(name).value) for name in _COUNTED]
        numbers = torch.tensor([*counted, self.train_s], dtype=torch.float64, device="cpu")
        *totals, train_s = self._ranks.total(numbers, what="counters to save").tolist()
        whole, own = self.recorder.state()
        state = {
            "position": self.position,
            "next_point": self.next_point,
            "evict_due_s": self.evict_due_s,
            "train_s": train_s / self._ranks.world_size,
            "counters": [int(total) for total in totals],
            "recorder": whole,
            "learners": {one.name: one.state() for one in self._learners},
            "world_size": self._ranks.world_size,
        }
        random = _random_state(self._learners[0].tables.shard.device)
        return state, {"recorder": own, "counters": [int(n) for n in counted], "random": random}

    def load_state(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from what `state` returned.

        Args:
            state: the same on every rank.
            own: this rank's; None where other ranks saved: then metrics and counters so far go to
                rank 0, and random numbers begin anew.
        """
        for one in self._learners:
            one.load_state(state["learners"][one.name])
        self.position, self.next_point = state["position"], state["next_point"]
        self.evict_due_s, self.trained_s = state["evict_due_s"], state["train_s"]
        self.recorder.load_state(state["recorder"], None if own is None else own["recorder"])
        counted = state["counters"] if own is None else own["counters"]
        if own is None and not self._ranks.leads:
            counted = [0 for _ in counted]
        self.telemetry.counter("steps").value = self.steps
        for name, value in zip(_COUNTED, counted, strict=True):
            self.telemetry.counter(name).value = value
        if own is not None:
            _set_random_state(own["random"], self._learners[0].tables.shard.device)
        else:
            # Other numbers than those of the first steps, and than other ranks'.
            torch.manual_seed(self._seed + self._ranks.rank + (self.steps << 20))


def _random_state(device: torch.device) -> dict[str, Any]:
    on_card = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"cpu": torch.get_rng_state(), "cuda": on_card}


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)

"""How far a run is: what a checkpoint holds next to models, so that training continues alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.models.tasks import columns_of
from shoal.train.learner import Learner
from shoal.train.ranks import Ranks
from shoal.train.summary import Recorder


class RunState:
    """The models of a run, and its position in the data, clocks, metrics and random numbers.

    Args:
        learners: all models of the run.
        stride: examples, over all ranks, between two points of the curves.
        ranks: who trains together.
        seed: of the run, for ranks that continue without random numbers of their own.

    Attributes:
        recorder: metrics and curves.
        position: global samples that all steps so far have consumed.
        places: of a stream: where its partitions continue; None: it has no places.
        left_out_before: of a stream: bad examples of processes before that this rank counts.
        left_out: of a stream: how many it counts ahead of places.
        next_point: examples at which the next point of the curves is due.
        course: what evaluations on the way have found.
        evict_due_s: event time of the next eviction; None: the first batches settle it.
        trained_s: seconds that training had taken before it continued, or in all once it has ended.
    """

    def __init__(
        self, learners: Sequence[Learner], *, stride: int, ranks: Ranks, seed: int = 0
    ) -> None:
        self.learners = tuple(learners)
        self.ranks = ranks
        self.stride = self.next_point = stride
        self._seed = seed
        self._began_s: float | None = None
        self.recorder = Recorder(columns_of(one.predicted for one in learners), ranks)
        self.position = 0
        self.places: Mapping[str, tuple[int, int]] | None = None
        self.left_out_before = 0
        self.left_out: Callable[[Mapping[str, tuple[int, int]]], int] = lambda _: 0
        self.course: dict[str, Any] = {}
        self.evict_due_s: int | None = None
        self.trained_s = 0.0

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self.learners[0].steps

    def check(self) -> None:
        """Raise what the last steps found in gradients; waits for a GPU."""
        for one in self.learners:
            one.check()

    def started(self) -> None:
        """Training begins, or continues."""
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
        train_s = self.ranks.total([self.train_s], what="training time to save").item()
        whole, own = self.recorder.state()
        places: dict[str, tuple[int, int]] = {}
        left_out = 0
        if self.places is not None:
            mine = dict(self.places), self.left_out(self.places)
            for one, bad in self.ranks.gathered(mine, what="places in a stream"):
                places |= {name: max(at, places.get(name, at)) for name, at in one.items()}
                left_out += bad
        state = {
            "position": self.position,
            "places": None if self.places is None else places,
            "left_out": left_out,
            "course": {what: dict(found) for what, found in self.course.items()},
            "next_point": self.next_point,
            "evict_due_s": self.evict_due_s,
            "train_s": train_s / self.ranks.world_size,
            "recorder": whole,
            "learners": {one.name: one.state() for one in self.learners},
            "world_size": self.ranks.world_size,
        }
        device = self.learners[0].tables.shard.device
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return state, {"recorder": own, "random": {"cpu": torch.get_rng_state(), "cuda": on_gpu}}

    def load_state(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from what `state` returned.

        Args:
            state: the same on every rank.
            own: this rank's; None where other ranks saved: then metrics so far go to rank 0, and
                random numbers begin from scratch.
        """
        for one in self.learners:
            one.load_state(state["learners"][one.name])
        self.position, self.next_point = state["position"], state["next_point"]
        self.places = state.get("places")
        # Whose they were is not known; rows of each rank are limited.
        left_out, ranks = state.get("left_out", 0), self.ranks
        self.left_out_before = (left_out + ranks.rank) // ranks.world_size
        self.course = {what: dict(found) for what, found in state.get("course", {}).items()}
        self.evict_due_s, self.trained_s = state["evict_due_s"], state["train_s"]
        self.recorder.load_state(state["recorder"], None if own is None else own["recorder"])
        if own is None:
            # Other numbers than those of the first steps, and than other ranks'.
            torch.manual_seed(self._seed + self.ranks.rank + (self.steps << 20))
            return
        torch.set_rng_state(own["random"]["cpu"])
        device, on_gpu = self.learners[0].tables.shard.device, own["random"]["cuda"]
        if device.type == "cuda" and on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

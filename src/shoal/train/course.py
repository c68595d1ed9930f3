"""The course of a run: its pauses, the best model so far, and an early stop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.config import RunConfig, as_first_rank
from shoal.telemetry import replace_text
from shoal.train.folder import RunFolder
from shoal.train.run_state import RunState
from shoal.train.saving import Saver

_MORE_IS_BETTER = ("auc", "gauc")


class Course:
    """Pauses of a run: those of its saver, and for evaluations if it is evaluated on its way.

    What it knows is in the run's state, so a run that resumes continues with it.

    Args:
        config: when, and what follows from it.
        run_state: of the run.
        saver: saves the best model, and what else is due; also an attribute.
        evaluate: the figures of the model as it is now; a collective call.
        folder: where the best checkpoint is named.

    Attributes:
        stops: whether training ends here.
    """

    def __init__(
        self,
        config: RunConfig,
        run_state: RunState,
        saver: Saver,
        evaluate: Callable[[], Mapping[str, float]],
        folder: RunFolder,
    ) -> None:
        self._eval, self._keeps = config.eval, config.checkpoint.keep_best
        self._run_state, self.saver, self._folder = run_state, saver, folder
        self._evaluate = evaluate
        self._asked, self._evaluated = False, -1
        self.stops = False
        if self._eval.every_steps is not None:
            self._continue()

    def _continue(self) -> None:
        """Take up what a run that resumes has found so far, by the metrics of now."""
        course, keeps, early = self._run_state.course, self._keeps, self._eval.early_stop
        self.saver.kept = course.get("best", {}).get("checkpoint")
        for what, metric in (("best", keeps), ("early_stop", early and early.metric)):
            if metric is not None and course.get(what, {}).get("metric") != metric:
                course.pop(what, None)
        since = course.get("early_stop", {}).get("since", 0)
        self.stops = early is not None and since >= early.patience
        if keeps is None:
            return
        # A checkpoint that became the best once it was written does not say so itself.
        ranks = self._run_state.ranks
        written = as_first_rank(ranks.control, self._written, what="best checkpoint of a run")
        best = course.get("best", {}).get("value")
        if written.get("metric") == keeps and (
            best is None or _gain(keeps, written["value"], best) > 0
        ):
            course["best"], self.saver.kept = written, written["checkpoint"]
        # A process may have died between a checkpoint and the file that names it.
        named = course.get("best", {}).get("checkpoint")
        if named not in (None, written.get("checkpoint")) and ranks.leads:
            self._write()

    def _written(self) -> dict[str, Any]:
        """What best.json says, where that checkpoint is still there."""
        best = self._folder.read_best()
        return best if self.saver.has(best.get("checkpoint")) else {}

    def _write(self) -> None:
        replace_text(self._folder.best, json.dumps(self._run_state.course["best"]) + "\n")

    def due_after(self, step: int) -> bool:
        """Whether training pauses after so many steps; the same on every rank, asked ahead."""
        return self._evaluates_after(step) or self.saver.due_after(step)

    def wants_pause(self) -> bool:
        """Whether this rank wants training to pause soon, for a save."""
        asked = self.saver.wants_pause()
        self._asked |= asked
        return asked

    def on_pause(self) -> None:
        """Do what is due: all ranks are here, after the same step."""
        step, control = self._run_state.steps, self._run_state.ranks.control
        saves = not self._evaluates_after(step) or self.saver.due_after(step)
        if self._evaluates_after(step):
            asked = as_first_rank(control, lambda: self._asked, what="save at an evaluation")
            saves = not self.evaluate() and (saves or asked)
        self._asked = False
        if saves:
            self.saver.on_pause()

    def finish(self) -> None:
        """The trained model may be the best one, too."""
        if self._keeps is not None and self._evaluated != self._run_state.steps:
            self.evaluate()

    def evaluate(self) -> bool:
        """Evaluate the model as it is now; returns whether it is the best so far, and was saved.

        Raises:
            CheckpointError: more saves in a row failed than are allowed.
        """
        figures, early = self._evaluate(), self._eval.early_stop
        self._evaluated = self._run_state.steps
        if early is not None:
            self._improves("early_stop", early.metric, figures, early.least)
            self.stops = self._run_state.course["early_stop"]["since"] >= early.patience
        before = self._run_state.course.get("best")
        if self._keeps is None or not self._improves("best", self._keeps, figures):
            return False
        self._run_state.course["best"]["checkpoint"] = self.saver.full_name
        if not self.saver.keep():
            self._run_state.course.pop("best")
            self._run_state.course |= {} if before is None else {"best": before}
            return False
        if self._run_state.ranks.leads:
            self._write()
        return True

    def _evaluates_after(self, step: int) -> bool:
        every = self._eval.every_steps
        return every is not None and step % every == 0

    def _improves(
        self, what: str, metric: str, figures: Mapping[str, float], least: float = 0.0
    ) -> bool:
        """Whether a figure is better than the best so far, by more than `least`; remembers it."""
        value = figures[metric]
        seen = self._run_state.course.get(what, {"metric": metric, "value": None, "since": 0})
        better = math.isfinite(value) and (
            seen["value"] is None or _gain(metric, value, seen["value"]) > least
        )
        now = {"metric": metric, "value": value, "step": self._run_state.steps, "since": 0}
        self._run_state.course[what] = now if better else {**seen, "since": seen["since"] + 1}
        return better


def _gain(metric: str, value: float, before: float) -> float:
    """By how much a figure is better."""
    return value - before if metric in _MORE_IS_BETTER else before - value

"""Ranks that wait for each other in different calls: found while they wait, next to the calls.

Every rank counts what it begins. One that has waited for a second writes into the job's store what
it has begun and what it waits for; once all ranks have, they read that. Ranks that each wait for a
call that another waiting rank has not begun wait forever, however old what they wrote is: none of
them can have been the first to continue. Calls that do not wait long cost a count.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

ALIKE = (
    "Call every collection, backward and step on all ranks alike and in one order, eval and saves "
    "too; a rank that has no use for a collection adds 0 times its outputs to the loss."
)

_log = logging.getLogger("shoal.comm")

_PATIENCE_S = 1.0
_LOOK_S = 0.25
_LINGER_S = 1.0  # before a rank fails, so that the others find the same and not that it is gone
_REMEMBERED = 32  # calls of a group
_ANSWER_S = 5.0  # for one word with the store


class Watchdog:
    """What this rank has begun and waits for. Only the thread that makes it is watched.

    Args:
        store: of the job, which all ranks reach; None: that of torch's default group.
        number: of this one over the store, where others left what they waited for.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store | None = None, number: int = 0
    ) -> None:
        self._rank, self._world_size = rank, world_size
        # A connection of its own: others may block in theirs.
        store = cast(Any, _get_default_store()).clone() if store is None else store
        cast(Any, store).set_timeout(datetime.timedelta(seconds=_ANSWER_S))
        self._store: Store | None = PrefixStore(f"shoal waits {number}", store)
        self._home = threading.get_ident()
        self._groups: list[Calls] = []
        self._lock = threading.Lock()
        self._waiting: _Wait | None = None
        self._next_s = 0.0
        self._counted = False
        self._in_torch: _Wait | None = None
        self._thread: threading.Thread | None = None

    def group(self, name: str) -> Calls:
        """A group of all ranks; they make theirs in the same order."""
        self._groups.append(Calls(name, self, len(self._groups)))
        return self._groups[-1]

    def begun(self) -> None:
        """A call begins: this rank does not wait."""
        if self._waiting is not None and threading.get_ident() == self._home:
            with self._lock:
                self._waiting = None
                if self._counted:
                    self._counted = False
                    self._ask("add", "ranks", -1)

    def look(self, group: Calls, number: int) -> str | None:
        """Between short waits for a call: which ranks are in which calls, if none can continue."""
        if threading.get_ident() != self._home:
            return None
        with self._lock:
            found = self._look((group, number))
        if found is not None:
            time.sleep(_LINGER_S)
        return found

    def enter(self, wait: _Wait) -> None:
        """From here on this rank is in a call of torch's, where a thread looks in its place."""
        self._in_torch = wait
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shoal-watch", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """The call has ended."""
        self._in_torch = None

    def close(self) -> None:
        """Look no more; its thread ends soon, its connection with it."""
        self._store = None

    def _work(self) -> None:
        while self._store is not None:
            time.sleep(_LOOK_S)
            wait = self._in_torch
            if wait is not None:
                with self._lock:
                    found = self._look(wait, lambda wait=wait: self._in_torch is wait)  # type: ignore[misc]
                if found is not None:
                    _log.error("rank %d cannot continue: %s. %s", self._rank, found, ALIKE)
                    return

    def _look(self, wait: _Wait, still: Callable[[], bool] = lambda: True) -> str | None:
        now_s = time.monotonic()
        if self._waiting != wait:
            self._waiting, self._next_s = wait, now_s + _PATIENCE_S
            if self._counted and not self._report(still):
                return None
        if now_s < self._next_s:
            return None
        self._next_s = now_s + _LOOK_S
        if not self._counted:
            # Others read what this rank wrote once it counts.
            if not self._report(still):
                return None
            self._counted = self._ask("add", "ranks", 1) is not None
        if self._ask("add", "ranks", 0) != self._world_size:
            return None
        said = [self._ask("get", str(rank)) for rank in range(self._world_size)]
        return None if None in said else _different([json.loads(one) for one in said])

    def _report(self, still: Callable[[], bool]) -> bool:
        """Write what this rank waits for; False: it has begun another call meanwhile."""
        assert self._waiting is not None
        group, number = self._waiting
        groups = [[one.name, *one.begun()] for one in self._groups]
        if not still():
            return False
        self._ask("set", str(self._rank), json.dumps([group.index, number, groups]))
        return True

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The store's answer; None once it is gone: waits then end by their time-outs alone."""
        if self._store is None:
            return None
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            self._store = None
            _log.debug("the store of the job does not answer: %s", error)
            return None


class Calls:
    """Calls of one group of all ranks, in order.

    Args:
        name: in messages.
        watch: None: nobody looks.
    """

    __slots__ = ("_calls", "_watch", "index", "name")

    def __init__(self, name: str = "", watch: Watchdog | None = None, index: int = 0) -> None:
        self.name, self._watch, self.index = name, watch, index
        self._calls: deque[tuple[int, str]] = deque([(0, "")], maxlen=_REMEMBERED)

    def begin(self, what: str) -> int:
        """Note a call; its number."""
        number = self._calls[-1][0] + 1
        self._calls.append((number, what))
        if self._watch is not None:
            self._watch.begun()
        return number

    def begun(self) -> tuple[int, list[str]]:
        """The number of the last call, and the last calls, whichever thread begins others now."""
        calls = list(self._calls)
        return calls[-1][0], [what for number, what in calls if number]

    def look(self, number: int) -> str | None:
        """See `Watchdog.look`."""
        return None if self._watch is None else self._watch.look(self, number)

    def enter(self, what: str) -> None:
        """A call of torch's begins, in which only other ranks are waited for."""
        number = self.begin(what)
        if self._watch is not None:
            self._watch.enter((self, number))

    def leave(self) -> None:
        """It has ended."""
        if self._watch is not None:
            self._watch.leave()


_Wait = tuple[Calls, int]


def _different(said: Sequence[Any]) -> str | None:
    """What is wrong with what ranks have begun and wait for; None: they may continue."""
    for index in range(min(len(groups) for _, _, groups in said)):
        first = max(groups[index][1] - len(groups[index][2]) for _, _, groups in said)
        last = min(groups[index][1] for _, _, groups in said)
        for number in range(first + 1, last + 1):
            whats = [groups[index][2][number - groups[index][1] - 1] for _, _, groups in said]
            if len(set(whats)) > 1:
                name = said[0][2][index][0]
                return f"call {number} of {name} is " + ", ".join(
                    f"{what!r} on ranks {_ranks(whats, what)}" for what in sorted(set(whats))
                )
    waits = [(index, number) for index, number, _ in said]
    texts = []
    for index, number in sorted(set(waits)):
        counts = [groups[index][1] if index < len(groups) else 0 for _, _, groups in said]
        late = [rank for rank, count in enumerate(counts) if count < number]
        if not late:
            return None
        name, count, calls = said[waits.index((index, number))][2][index]
        what = calls[number - count - 1] if count - number < len(calls) else "a call"
        texts.append(
            f"ranks {_ranks(waits, (index, number))} wait in {what!r} of {name}, which ranks {late}"
            " have not called"
        )
    return "; ".join(texts)


def _ranks(values: Sequence[object], wanted: object) -> list[int]:
    return [rank for rank, value in enumerate(values) if value == wanted]

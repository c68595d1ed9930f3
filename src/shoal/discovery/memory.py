"""Discovery among threads of one process, for tests and tries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from shoal.discovery.values import check_address, check_index, check_role

_Changed = Callable[[Mapping[int, str]], None]


class Space:
    """What `Memory` sessions share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held: dict[tuple[str, int], tuple[Memory, str]] = {}
        self.watching: list[tuple[Memory, str, _Changed]] = []

    def report(self, role: str) -> None:
        """Call who watches a role."""
        for session, watched, changed in list(self.watching):
            if watched == role:
                changed(session.query(role))


class Memory:
    """One process of a job, as it were.

    Args:
        space: shared with the other processes.
    """

    def __init__(self, space: Space) -> None:
        self._space = space

    def register(self, role: str, index: int, address: str, *, replace: bool = True) -> bool:
        """Have an index."""
        place = check_role(role), check_index(index)
        checked = check_address(address) if address else ""
        with self._space.lock:
            holder, _ = self._space.held.get(place, (self, ""))
            if holder is not self and not replace:
                return False
            self._space.held[place] = self, checked
            self._space.report(role)
            return True

    def query(self, role: str) -> dict[int, str]:
        """Who is there."""
        check_role(role)
        with self._space.lock:
            return {
                index: address
                for (other, index), (_, address) in sorted(self._space.held.items())
                if other == role and address
            }

    def watch(self, role: str, changed: _Changed) -> None:
        """Called by the thread that changes something."""
        with self._space.lock:
            self._space.watching.append((self, role, changed))
            changed(self.query(role))

    def close(self) -> None:
        """As a process that ends."""
        with self._space.lock:
            self._space.watching = [one for one in self._space.watching if one[0] is not self]
            own = [place for place, (holder, _) in self._space.held.items() if holder is self]
            for place in own:
                del self._space.held[place]
            for role in {role for role, _ in own}:
                self._space.report(role)

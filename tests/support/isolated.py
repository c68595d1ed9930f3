"""Many cases, each of which may crash, hang or eat memory, in forked children of one process."""

from __future__ import annotations

import os
import select
import signal
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Outcomes", "TooLong", "failures", "limited"]

Outcomes = dict[int, str]
"""Number of a case -> what went wrong with it."""

_BATCH = 64


class TooLong(BaseException):
    """Nothing that code under test catches."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TooLong if a block takes more processor time; other load of the machine does not count."""

    def ring(*_: object) -> None:
        raise TooLong(f"more than {seconds} s")

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def failures(numbers: Sequence[int], run: Callable[[int], str | None], dead_s: float) -> Outcomes:
    """What goes wrong with cases; `run` returns None for one that is fine.

    A child runs many; where one dies or is silent for `dead_s`, the rest go to another.
    """
    found: Outcomes = {}
    left = list(numbers)
    while left:
        done = _child(left[:_BATCH], run, found, dead_s)
        left = left[done:]
    return found


def _child(
    numbers: Sequence[int], run: Callable[[int], str | None], found: Outcomes, dead_s: float
) -> int:
    """Run cases in a child until it ends; how many are over."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _serve(numbers, run, theirs)
    os.close(theirs)
    done = 0
    with open(ours, "rb", buffering=0) as pipe:
        while done < len(numbers):
            if not select.select([pipe], [], [], dead_s)[0]:
                os.kill(pid, signal.SIGKILL)
                found[numbers[done]] = f"nothing for {dead_s} s"
                done += 1
                break
            head = _read(pipe, 4)
            if head is None:
                break
            said = _read(pipe, struct.unpack("i", head)[0])
            if said:
                found[numbers[done]] = said.decode()
            done += 1
    _, status = os.waitpid(pid, 0)
    if done < len(numbers) and not (done and numbers[done - 1] in found):
        found[numbers[done]] = f"the process died: wait status {status}"
        done += 1
    return done


def _read(pipe: object, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more: bytes = pipe.read(size - len(data))  # type: ignore[attr-defined]
        if not more:
            return None
        data += more
    return data


def _serve(numbers: Sequence[int], run: Callable[[int], str | None], pipe: int) -> None:
    try:
        for number in numbers:
            said = ""
            try:
                said = run(number) or ""
            except (Exception, TooLong):  # noqa: BLE001 - it is what the parent wants to know
                said = traceback.format_exc()
            data = said.encode("utf-8", "backslashreplace")[-4000:]
            os.write(pipe, struct.pack("i", len(data)) + data)
    finally:
        os._exit(0)

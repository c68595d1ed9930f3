"""The benchmarks of communication: what they measure, log and return."""

from __future__ import annotations

import itertools
import logging

import pytest

from shoal import comm
from shoal.comm.benchmarks import BenchmarkSettings, benchmark_settings
from shoal.comm.collectives import LocalCollectives
from shoal.errors import ConfigError, DeviceUnavailable


class TwoRanks(LocalCollectives):
    """Says that it is one of two ranks, and notes what is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2
        self.sent: list[tuple[int, tuple[int, ...]]] = []

    def all_to_all(self, parts, *, what):  # type: ignore[no-untyped-def]
        self.sent += [(part.data.shape[0], part.send) for part in parts]
        return super().all_to_all(parts, what=what)


def ticking(interval_s: float):  # type: ignore[no-untyped-def]
    """A clock that each 20 iterations find `interval_s` later: it is read twice for them."""
    readings = itertools.chain.from_iterable(
        (number * interval_s, number * interval_s) for number in itertools.count(1)
    )
    return iter([0.0, *itertools.islice(readings, 100)]).__next__


def test_all_reduce_goodput(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.comm")
    goodputs = comm.byteps_benchmark_ar(
        1000, 90, True, collectives=LocalCollectives(), clock=ticking(2.0)
    )
    # 20 iterations in 2 s are 100 ms each: 1000 x 32 / 100 / 1e6.
    assert goodputs == pytest.approx([0.00032] * 3)
    done = [record.message for record in caplog.records if record.message.startswith("DONE")]
    assert done == [
        f"DONE iter={count}, latency=100 ms, Goodput=0.00032 Gb/s, is_cpu=True"
        for count in (20, 40, 60, 80)
    ]


def test_all_to_all_between_cpus_takes_an_eighth() -> None:
    collectives = TwoRanks()
    goodputs = comm.byteps_benchmark_a2a(
        160, 60, False, False, collectives=collectives, clock=ticking(0.02)
    )
    assert collectives.sent == [(20, (10, 10))] * 60
    assert goodputs == pytest.approx([20 * 32 / 1.0 / 1e6] * 2)


def test_all_to_all_must_be_even() -> None:
    with pytest.raises(ConfigError, match="multiple of 2 ranks"):
        comm.byteps_benchmark_a2a(24, 40, False, False, collectives=TwoRanks())


@pytest.mark.parametrize("which", ["c2g", "g2c", "g2g"])
def test_a_card_that_is_asked_for_must_be_there(which: str) -> None:
    mesh = comm.init(device="cpu")
    with pytest.raises(DeviceUnavailable, match="a rank with a CUDA GPU"):
        comm.bps_comm_benchmark(benchmark_settings({}, which=which), mesh=mesh)
    comm.shutdown()


def test_summary_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    settings = BenchmarkSettings(which="c2c", iterations=40, all_to_all_length=64)
    found = comm.bps_comm_benchmark(settings, mesh=comm.init(device="cpu"))
    comm.shutdown()
    assert [length for length, _ in found["c2c"]] == [64, 32, 16]
    assert capsys.readouterr().out == f"c2c_summary: {found['c2c']}\n"

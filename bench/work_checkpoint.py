"""What `checkpoint.py` measures in each process."""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness import Measured, median
from limits_cpu import resident_bytes
from shoal import Segment, TableSpec, checkpoint, initializers, optimizers
from shoal.table.cpu.shard import CpuShard
from shoal.table.hosting import HostedTables
from shoal.table.shard import IdGroups, Snapshot, StepContext
from shoal.table.values import Cursor, RowChunk

__all__ = ["TASKS"]

DIM = 32
ROW_BYTES = 8 + 3 * 4 + 2 * 4 * DIM
CHUNK = 250_000
BATCH = 65_536
ZIPF = 1.05
PLAIN_BLOCK = 8 << 20


def _spec() -> TableSpec:
    segment = Segment(
        dim=DIM, initializer=initializers.Zeros(), optimizer=optimizers.Adagrad(lr=0.01)
    )
    return TableSpec(name="items", segments=(segment,))


def _ids(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, dtype=torch.int64) * 0x9E3779B1 + 7


def _filled(rows: int, threads: int) -> CpuShard:
    shard = CpuShard([_spec()], threads=threads)
    values = torch.rand(CHUNK, 2 * DIM)
    for start in range(0, rows, CHUNK):
        ids = _ids(start, min(start + CHUNK, rows))
        many = len(ids)
        ones = torch.ones(many, dtype=torch.int64)
        weights, state = values[:many, :DIM].contiguous(), values[:many, DIM:].contiguous()
        shard.load(0, RowChunk("items", ids, weights, state, ones, ones * 1_000, ones))
    return shard


def _contents(shard: CpuShard) -> checkpoint.Contents:
    return checkpoint.Contents(tables={"bench": HostedTables(shard.specs, shard)})


def _group(ids_N: Tensor) -> IdGroups:
    return IdGroups(ids_N, torch.tensor([0, len(ids_N)]), torch.zeros(1, dtype=torch.int32))


@contextmanager
def _folder(where: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-ckpt-", dir=where) as folder:
        yield Path(folder)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _plain_write(file: Path, size: int, block: memoryview) -> None:
    with file.open("wb", buffering=0) as target:
        for at in range(0, size, PLAIN_BLOCK):
            target.write(block[: min(PLAIN_BLOCK, size - at)])
        os.fsync(target.fileno())


def _plain_read(file: Path, block: memoryview) -> None:
    with file.open("rb", buffering=0) as source:
        while source.readinto(block):
            pass


def _forget_cached(folder: Path) -> None:
    """Have the next reader of these files go to the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _touched_bytes_per_s(size: int) -> float:
    """Of memory that the process has not used yet, in huge pages as tables have it: what a loaded
    table has to be put into.

    Where a virtual machine's host takes back free memory, that is most of a load. It takes it back
    within seconds, which this waits for, so that the load after it finds none either.
    """
    time.sleep(4)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    took = _timed(lambda: torch.frombuffer(memory, dtype=torch.uint8).fill_(1))
    memory.close()
    time.sleep(4)
    return size / took


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class _Peak:
    """Peak of this process's private resident memory while this is open, sampled."""

    def __enter__(self) -> _Peak:
        self.start = resident_bytes()
        self.peak = self.start
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.end = resident_bytes()


@dataclass
class _Rates:
    """Bytes a second of interleaved runs."""

    ours: list[float]
    plain: list[float]

    def measured(self, note: str = "", limit: float | None = None) -> Measured:
        ours, plain = median(self.ours), median(self.plain)
        part = None if limit is None else ours / limit
        return Measured(ours=ours / 1e9, peer_value=plain / 1e9, note=note, limit_fraction=part)


def write_and_read(
    rows: int, passes: int, threads: int, folder: str | None
) -> Mapping[str, Measured]:
    torch.set_num_threads(threads)
    shard = _filled(rows, threads)
    contents = _contents(shard)
    block = memoryview(bytearray(os.urandom(PLAIN_BLOCK)))
    writes, reads = _Rates([], []), _Rates([], [])
    written_extra, read_extra, seconds, touches = [], [], [], []
    with _folder(folder) as base:
        with _Peak() as peak:  # before any memory is kept for the next save
            checkpoint.save(base / "warm", contents, step=1, position=0)
        written_extra.append(peak.peak - peak.start)
        for turn in range(passes):
            file, saved = base / f"plain{turn}", base / f"full{turn}"
            with _Peak() as peak:
                took = _timed(
                    lambda saved=saved: checkpoint.save(saved, contents, step=1, position=0)
                )
            written_extra.append(peak.peak - peak.start)
            size = _size(saved)
            seconds.append(took)
            writes.ours.append(size / took)
            plain = _timed(lambda file=file, size=size: _plain_write(file, size, block))
            writes.plain.append(size / plain)
            _forget_cached(base)
            reads.plain.append(size / _timed(lambda file=file: _plain_read(file, block)))
            touches.append(_touched_bytes_per_s(size))
            _forget_cached(base)
            fresh = CpuShard([_spec()], threads=threads)
            with _Peak() as peak:
                took = _timed(lambda s=saved, f=fresh: checkpoint.load(s, _contents(f)))
            if fresh.size(0) != rows:
                raise SystemExit(f"{fresh.size(0)} of {rows} rows came back")
            reads.ours.append(size / took)
            read_extra.append(peak.peak - peak.end)
            del fresh
            file.unlink()
        delta_s, delta_size = _delta(shard, contents, base)
    full_s = median(seconds)
    return {
        "full, write": writes.measured(),
        "full, read": reads.measured(
            f"page cache dropped before; limit: new memory, {median(touches) / 1e9:.2f} GB/s",
            median(touches),
        ),
        "full, memory while writing": Measured(ours=max(written_extra) / 2**20),
        "full, memory while reading": Measured(ours=max(max(read_extra), 1) / 2**20),
        "delta of 1 %, time": Measured(ours=delta_s, peer_value=0.03 * full_s),
        "delta of 1 %, size": Measured(ours=delta_size / 1e6, peer_value=0.03 * size / 1e6),
    }


def _delta(shard: CpuShard, contents: checkpoint.Contents, base: Path) -> tuple[float, int]:
    """Seconds and bytes of saving 1 % changed rows."""
    rows = shard.size(0)
    store = base / "chain"
    saving = checkpoint.begin(store, contents, kind="full", step=1, position=0)
    parent = saving.wait()
    cursors, seconds, folder = saving.cursors, [], None
    for step in range(2, 5):
        touched = torch.randperm(rows)[: rows // 100]
        ids_N = touched * 0x9E3779B1 + 7
        shard.assign(_group(ids_N), [torch.rand(len(ids_N), DIM)], ctx=StepContext())
        start = time.perf_counter()
        saving = checkpoint.begin(
            store, contents, kind="delta", parent=parent, since=cursors, step=step, position=0
        )
        parent = saving.wait()
        seconds.append(time.perf_counter() - start)
        cursors = saving.cursors
        folder = sorted(store.iterdir())[-1]
    assert folder is not None
    return median(seconds), _size(folder)


@dataclass(frozen=True)
class _Steps:
    """Seconds of steps, without the pauses after them, and bytes of rows changed a second."""

    seconds: list[float]
    touched_bytes_per_s: float


def _zipf(rows: int, batches: int) -> list[Tensor]:
    """Batches of ids whose ranks follow a power law, by inversion; ranks are scattered."""
    power = 1.0 - ZIPF
    top = rows**power
    found = []
    for seed in range(batches):
        uniform = torch.rand(
            BATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        rank = ((1 + uniform * (top - 1)) ** (1 / power)).long().clamp(1, rows) - 1
        found.append(rank * 7_919_999 % rows * 0x9E3779B1 + 7)
    return found


def _train(
    shard: CpuShard, batches: list[Tensor], limit_bytes_per_s: float, going: Callable[[], bool]
) -> _Steps:
    grads = torch.rand(BATCH, DIM) * 1e-3
    seconds: list[float] = []
    touched, begun, step = 0, time.perf_counter(), 0
    while going():
        ids_N = batches[step % len(batches)]
        start = time.perf_counter()
        shard.apply_ids(_group(ids_N), [grads], ctx=StepContext(global_step=step))
        seconds.append(time.perf_counter() - start)
        touched += ids_N.unique().numel() * ROW_BYTES
        step += 1
        ahead_s = touched / limit_bytes_per_s - (time.perf_counter() - begun)
        if ahead_s > 0:
            time.sleep(ahead_s)
    return _Steps(seconds, touched / (time.perf_counter() - begun))


def during_training(
    rows: int, passes: int, threads: int, folder: str | None
) -> Mapping[str, Measured]:
    """Training has one thread, the save the others."""
    torch.set_num_threads(1)
    shard = _filled(rows, 1)
    contents = _contents(shard)
    block = memoryview(bytearray(os.urandom(PLAIN_BLOCK)))
    batches = _zipf(rows, 64)
    gc.collect()
    gc.freeze()  # as runs do while they train
    alone: list[float] = []
    saving_s: list[float] = []
    rates, touched, extra, limits = _Rates([], []), [], [], []
    size = rows * ROW_BYTES
    took = 3.0
    with _folder(folder) as base:
        for turn in range(passes + 1):
            saved = base / f"full{turn}"
            plain = size / _timed(lambda base=base: _plain_write(base / "plain", size, block))
            limit = plain / 2
            stop = time.perf_counter() + took  # as long as a save: rare disturbances meet both
            with _Peak():  # its samples cost both the same
                quiet = _train(shard, batches, limit, lambda stop=stop: time.perf_counter() < stop)
            with _Peak() as peak:
                start = time.perf_counter()
                saving = checkpoint.begin(saved, contents, kind="full", step=1, position=0)
                begun_s = time.perf_counter() - start
                steps = _train(shard, batches, limit, lambda saving=saving: not saving.done)
                saving.wait()
                took = time.perf_counter() - start
            extra.append(peak.peak - peak.start)
            if turn:  # the first is a warm-up
                alone += quiet.seconds
                saving_s += [steps.seconds[0] + begun_s, *steps.seconds[1:]]
                rates.ours.append(_size(saved) / took)
                rates.plain.append(plain)
                touched.append(steps.touched_bytes_per_s)
                limits.append(limit)
    mean, mean_alone = sum(saving_s) / len(saving_s), sum(alone) / len(alone)
    note = f"{len(saving_s)} steps of {BATCH} ids; {len(alone)} without: {mean_alone * 1e3:.2f} ms"
    return {
        "saving during training, mean step": Measured(
            ours=mean * 1e3, peer_value=1.1 * mean_alone * 1e3, note=note
        ),
        "saving during training, worst step": Measured(
            ours=max(saving_s) * 1e3,
            peer_value=4 * max(alone) * 1e3,
            note="the step at which the save began has the time of `begin` in it",
        ),
        "saving during training, memory": Measured(ours=max(extra) / 2**20),
        "saving during training, write": rates.measured(),
        "saving during training, touched": Measured(
            ours=median(touched) / 1e9, peer_value=median(limits) / 1e9
        ),
    }


def finding_changes(
    rows: int, passes: int, threads: int, folder: str | None
) -> Mapping[str, Measured]:
    del folder
    torch.set_num_threads(threads)
    shard = _filled(rows, threads)
    shard.snapshot().close()  # deletions are kept from here on
    words = torch.zeros(rows, dtype=torch.int32)
    torch.set_num_threads(1)

    def touch(ids_N: Tensor) -> None:
        shard.assign(_group(ids_N), [torch.zeros(len(ids_N), DIM)], ctx=StepContext())

    def scan(snapshot: Snapshot) -> tuple[float, int]:
        """Seconds, and how many changed rows were found."""
        start = time.perf_counter()
        found = int(snapshot.histogram(0, 0))
        return time.perf_counter() - start, found

    # Row numbers follow the order of loading: one row in each block of 1,024.
    every = _ids(0, rows)[:: 1 << 10].contiguous()
    few = every[::1000].contiguous()
    scans, reads, sparse = [], [], []
    for _ in range(7 * passes):
        reads.append(_timed(lambda: words.max()))
        with shard.snapshot(Cursor(shard.incarnation, shard.close_version())) as snapshot:
            # Stamped after the snapshot: each block has a later stamp, no row is in the span.
            touch(every)
            took, found = scan(snapshot)
        if found:
            raise SystemExit(f"{found} rows changed in a version without a change")
        scans.append(took)
    for _ in range(7 * passes):
        mark = shard.close_version()
        touch(few)
        with shard.snapshot(Cursor(shard.incarnation, mark)) as snapshot:
            took, found = scan(snapshot)
        if found != len(few):
            raise SystemExit(f"{found} of {len(few)} changed rows came")
        sparse.append(took)
    size = 4 * rows / 1e9
    return {
        "finding changed rows": Measured(
            ours=size / median(scans), peer_value=size / median(reads), note="torch.max of as many"
        ),
        "finding changed rows, 0.1 % of blocks touched": Measured(
            ours=size / median(sparse), peer_value=size / median(scans)
        ),
    }


TASKS: Mapping[str, Callable[..., Mapping[str, Measured]]] = {
    "write_and_read": write_and_read,
    "during_training": during_training,
    "finding_changes": finding_changes,
}

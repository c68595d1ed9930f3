"""The compiled core, as the table room uses it; addresses are `Tensor.data_ptr()` integers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Buffer = Any  # whatever has the buffer protocol

class TableFullError(Exception): ...
class NonFiniteError(Exception): ...
class TicketStateError(Exception): ...
class SnapshotRefused(Exception): ...

class SharedRegion:
    world_size: int
    slot_bytes: int
    @staticmethod
    def create(name: str, token: int, world_size: int, slot_bytes: int) -> SharedRegion: ...
    @staticmethod
    def open(name: str, token: int) -> SharedRegion: ...
    @staticmethod
    def unlink(name: str) -> None: ...

class SharedCall: ...

class SharedGroup:
    def __init__(self, region: SharedRegion, rank: int, timeout_s: float) -> None: ...
    def watch_peers(self) -> None: ...
    def start(
        self,
        parts: Sequence[tuple[int, int, int, Sequence[int], Sequence[int]]],
        ranks: int,
        tag: int,
    ) -> SharedCall: ...
    def wait(self, call: SharedCall, most_s: float) -> bool: ...
    def failure(self) -> tuple[str, int, str, int, str]: ...
    def close(self) -> None: ...

class Ticket:
    live: bool
    event_time_s: int
    def end(self) -> None: ...
    def admitted(self, out: int) -> None: ...
    def found(self, out: int) -> None: ...

class Plan:
    def __init__(self, pools: Sequence[dict[str, Any]], widths: Sequence[int]) -> None: ...

class Groups:
    def __init__(
        self, n: int, count: int, ids: int, splits: int, tables: int, n_tables: int
    ) -> None: ...
    def bags_fit(self, offsets: int, bags: int) -> bool: ...

class Record:
    def __init__(
        self,
        ticket: Ticket,
        plan: Plan | None,
        offsets: int,
        bags: int,
        weights: int,
        grads: Sequence[int],
        scale: float,
    ) -> None: ...

class Sums:
    table: int
    n: int
    def copy_to(self, ids: int, sums: int, counts: int) -> None: ...

class Exported:
    n: int
    def copy_to(self, columns: Sequence[int]) -> None: ...

class ChangePage:
    done: bool
    restarted: bool
    cursor: tuple[int, int, int, int]
    def rows(self, table: int) -> Exported: ...
    def deleted_count(self, table: int) -> int: ...
    def copy_deleted(self, table: int, to: int) -> None: ...

def give_way() -> None: ...

class Snapshot:
    epoch: int
    since: int
    def stats(self) -> tuple[int, int, float]: ...
    def histogram(self, table: int, bits: int, counts: int, threads: int) -> None: ...
    def find(self, table: int, first: int, last: int, threads: int) -> int: ...
    def read(self, columns: Sequence[int], threads: int) -> None: ...
    def deleted_count(self, table: int) -> int: ...
    def copy_deleted(self, table: int, to: int) -> None: ...
    def close(self) -> None: ...

class RowImages:
    def __init__(
        self,
        forms: Sequence[tuple[int, int, int, int]],
        since: int,
        epoch: int,
        budget_bytes: int,
    ) -> None: ...
    def keep(self, table: int, records: int, places: int, versions: int, n: int) -> None: ...
    def tick(self) -> int: ...
    def check(self) -> None: ...
    def stats(self) -> tuple[int, int, float]: ...
    def histogram(self, table: int, bits: int, before: int, counts: int) -> None: ...
    def find(self, table: int, first: int, last: int) -> int: ...
    def copy(self, columns: Sequence[int]) -> None: ...

class Shard:
    last_step: int
    def __init__(self, specs: Sequence[dict[str, Any]]) -> None: ...
    def find(self, groups: Groups, outputs: Sequence[int], found: int, threads: int) -> None: ...
    def find_pooled(
        self,
        groups: Groups,
        plan: Plan,
        offsets: int,
        bags: int,
        weights: int,
        outputs: Sequence[int],
        threads: int,
    ) -> None: ...
    def gather(
        self,
        ticket: Ticket,
        plan: Plan | None,
        offsets: int,
        bags: int,
        weights: int,
        outputs: Sequence[int],
        global_step: int,
        threads: int,
    ) -> None: ...
    def find_or_init(
        self, groups: Groups, counts: int, global_step: int, event_time_s: int, threads: int
    ) -> Ticket: ...
    def apply(
        self,
        records: Sequence[Record],
        rates: Sequence[float],
        global_step: int,
        event_time_s: int,
        nan_policy: int,
        nan_clip: float,
        threads: int,
    ) -> None: ...
    def sum(self, records: Sequence[Record]) -> list[Sums]: ...
    def apply_ids(
        self,
        groups: Groups,
        counts: int,
        grads: Sequence[int],
        seen: Sequence[int],
        rates: Sequence[float],
        global_step: int,
        event_time_s: int,
        nan_policy: int,
        nan_clip: float,
        threads: int,
    ) -> None: ...
    def write(
        self,
        groups: Groups,
        mode: int,
        values: Sequence[int],
        status: int,
        global_step: int,
        event_time_s: int,
        threads: int,
    ) -> None: ...
    def evict(self, now_s: int) -> int: ...
    def cut(self) -> int: ...
    def changes(
        self, incarnation: int, from_epoch: int, to_epoch: int, position: int, limit: int
    ) -> ChangePage: ...
    def release(self, epoch: int) -> None: ...
    def stop_changes(self) -> None: ...
    def incarnation(self) -> int: ...
    def snapshot(
        self, since: tuple[int, int, int, int] | None, buffer_bytes: int, window_rows: int
    ) -> Snapshot: ...
    def resume(self, epoch: int) -> tuple[int, int, int, int]: ...
    def clear(self, table: int) -> None: ...
    def export(self, table: int) -> Exported: ...
    def entry(self, table: int, id: int) -> Exported: ...
    def expect(self, table: int, rows: int) -> None: ...
    def load(self, table: int, n: int, columns: Sequence[int], threads: int) -> None: ...
    def size(self, table: int) -> int: ...
    def stats(self, table: int) -> dict[str, int]: ...
    def admission_counts(self, table: int) -> tuple[list[int], list[int]]: ...
    def admission_cells(self, table: int) -> bytes: ...
    def load_admission(
        self, table: int, ids: Sequence[int], counts: Sequence[int], cells: bytes
    ) -> None: ...

def pooled_bytes(bytes: int) -> Tensor: ...
def pooled32(rows: int, columns: int) -> Tensor: ...
def pooled64(rows: int, columns: int) -> Tensor: ...
def isa() -> str: ...
def crc32(data: Buffer, before: int = 0) -> int: ...
def crc32_copy(to: Buffer, data: Buffer, before: int = 0) -> int: ...
def crc32_by_tables(data: Buffer, before: int = 0) -> int: ...
def ordered_by_hash(ids: int, n: int, salt: int) -> bool: ...
def layout_forward(
    buffers: Sequence[int],
    floats: Sequence[int],
    rows: int,
    numbers: int,
    n: int,
    splits: int,
    n_cells: int,
    cells: int,
    batch_sizes: Sequence[int],
    features: int,
    n_features: int,
    slices: int,
    n_slices: int,
    outputs: Sequence[int],
    wide: bool,
    threads: int,
) -> bool: ...
def layout_backward(
    grads: Sequence[int],
    scale: float,
    buffers: Sequence[int],
    floats: Sequence[int],
    rows: int,
    numbers: int,
    n: int,
    splits: int,
    n_cells: int,
    cells: int,
    batch_sizes: Sequence[int],
    features: int,
    n_features: int,
    slices: int,
    n_slices: int,
    slice_floats: int,
    wide: bool,
    threads: int,
) -> bool: ...
def count_fids(
    ids: int,
    splits: int,
    n: int,
    n_features: int,
    n_shards: int,
    floored: bool,
    plan: Sequence[int],
    n_tables: int,
    unique: bool,
    places: int,
    buffers: int,
    threads: int,
) -> bool: ...
def fill_fids(
    ids: int,
    splits: int,
    n: int,
    n_features: int,
    n_shards: int,
    floored: bool,
    plan: Sequence[int],
    n_tables: int,
    places: int,
    buffers: int,
    lists: int,
    threads: int,
) -> None: ...

ops: Any  # operators of `shoal.ops` on addresses and sizes that it has checked

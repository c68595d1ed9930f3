"""Which ids of a GPU shard get a row: counters of occurrences, settings by slot, the decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.ids import salt, to_signed
from shoal.kernels import admission
from shoal.kernels.admission import SIDE_CELLS, move_counters
from shoal.kernels.host_copies import HostCopy, copy_to_host, retire, sent
from shoal.kernels.tables import EMPTY_KEY, ERASED_KEY, CallGroups
from shoal.rules.admission import Admission
from shoal.rules.expiry import BySlot
from shoal.table import checks
from shoal.table.values import AdmissionState


class SlotValues:
    """The value of an id is `values_L[(id >> shift) & mask]`.

    Args:
        values: the setting.
        device: where `values_L`, int64, goes.
    """

    def __init__(self, values: BySlot, device: torch.device) -> None:
        self.mask = values.mask if values.values else 0
        self.shift = values.shift
        values_L = torch.full((self.mask + 1,), values.otherwise, dtype=torch.int64, device="cpu")
        for slot, value in values.values:
            values_L[slot] = value
        self.values_L = sent(values_L, device)


_FIRST_SLOTS = 1 << 10
_LOAD = 0.75
_LARGEST_COUNT = (1 << 32) - 1
_SIDE_IDS = torch.tensor([EMPTY_KEY, ERASED_KEY], device="cpu")


class _Exact:
    """Index of one table. `taken` bounds its slots that are not empty, `erased` those that could
    be again, from below.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        cells = slots + SIDE_CELLS
        self.slots = slots
        self.keys = torch.full((cells,), EMPTY_KEY, dtype=torch.int64, device=device)
        self.cells = torch.zeros(cells, dtype=torch.int32, device=device)
        self.taken = 0
        self.erased = 0


class AdmissionCounters:
    """Admission counters of all tables of a shard; not thread-safe.

    Args:
        tables: hash name and rule of each table, in the shard's order; None admits at the first
            occurrence.
        device: where the shard is.
    """

    def __init__(
        self, tables: Sequence[tuple[str, Admission | None]], device: torch.device | str
    ) -> None:
        self._device = torch.device(device)
        self._names = [name for name, _ in tables]
        self._rules = [rule or Admission() for _, rule in tables]
        self._values = [SlotValues(rule.needed, self._device) for rule in self._rules]
        self._kinds = [_kind(rule) for rule in self._rules]
        self._counting = frozenset(
            table for table, kind in enumerate(self._kinds) if kind != admission.NONE
        )
        self._exact = {
            table: _Exact(_FIRST_SLOTS, self._device) for table in self._all(admission.EXACT)
        }
        self._sketches = {
            table: torch.zeros(
                self._rules[table].sketch_depth * self._rules[table].sketch_width,
                dtype=torch.int32,
                device=self._device,
            )
            for table in self._all(admission.SKETCH)
        }
        words = [self._words(k, self._exact.get(k)) for k in range(len(tables))]
        self._tables = admission.CounterTables(
            torch.tensor(words, dtype=torch.int64, device="cpu")
            .reshape(-1, admission.COUNTER_WORDS)
            .to(self._device),
            torch.zeros(len(tables), 2, dtype=torch.int64, device=self._device),
            max((self._rules[table].sketch_depth for table in self._sketches), default=0),
        )
        # Tallies on their way to the host, and the ids handed in to each table since.
        self._report: tuple[HostCopy, dict[int, int]] | None = None
        # Reports follow one another in the stream, so they may land in one place.
        self._landing_KC = torch.zeros(
            len(tables), 2, dtype=torch.int64, pin_memory=self._device.type == "cuda", device="cpu"
        )

    def add(
        self,
        call: CallGroups,
        counts_N: Tensor | None,
        wanted_N: Tensor,
        sizes: Mapping[int, int],
    ) -> Tensor:
        """Add a call's occurrences and decide: bool [N], which ids may have a row.

        Args:
            counts_N: int64 [N], occurrences that each position stands for; None: 1 each.
            wanted_N: bool [N], ids without a row; others are neither counted nor admitted.
            sizes: table -> ids of the call that are its own; a host's upper bound will do.

        Raises:
            torch.OutOfMemoryError: nothing was counted.
        """
        if not self.counts_any(sizes):
            return wanted_N
        self._hear()
        for table in sizes.keys() & self._exact.keys():
            self._make_room(table, sizes[table])
        admitted_N = torch.empty_like(wanted_N)
        admission.add_occurrences(self._tables, call, counts_N, wanted_N)
        self._ask()
        admission.admit(self._tables, call, wanted_N, admitted_N)
        return admitted_N

    def undo(self, call: CallGroups, counts_N: Tensor | None, wanted_N: Tensor) -> None:
        """Take back what `add` with these arguments counted, for a call that is refused."""
        admission.add_occurrences(self._tables, call, counts_N, wanted_N, undo=True)

    def forget(self, call: CallGroups, admitted_N: Tensor) -> None:
        """Free what is kept of ids that get a row; a sketch keeps all."""
        if self._exact:
            admission.forget_occurrences(self._tables, call, admitted_N)

    def counts_any(self, tables: Iterable[int]) -> bool:
        """Whether any of these tables may refuse an id."""
        return not self._counting.isdisjoint(tables)

    def nbytes(self, table: int) -> int:
        """Bytes on the device that a table's counters take."""
        if table in self._exact:
            return self._exact[table].keys.nbytes + self._exact[table].cells.nbytes
        return self._sketches[table].nbytes if table in self._sketches else 0

    def clear(self, table: int) -> None:
        """Forget all occurrences of a table."""
        if table in self._exact:
            exact = self._exact[table]
            exact.keys.fill_(EMPTY_KEY)
            exact.cells.zero_()
            exact.taken = exact.erased = 0
            self._tables.tallies_KC[table].zero_()
            self._report = None
        if table in self._sketches:
            self._sketches[table].zero_()

    def state(self, table: int) -> AdmissionState:
        """Admission counts of a table's ids, on the CPU; pairs in the order of ids."""
        empty_P = torch.empty(0, dtype=torch.int64, device="cpu")
        if table in self._sketches:
            return AdmissionState(empty_P, empty_P, self._sketches[table].cpu().numpy().tobytes())
        if table not in self._exact:
            return AdmissionState(empty_P, empty_P, b"")
        exact = self._exact[table]
        pairs = exact.slots + len(_SIDE_IDS)
        counts = exact.cells[:pairs].cpu().to(torch.int64) & _LARGEST_COUNT
        ids = torch.cat([exact.keys[: exact.slots].cpu(), _SIDE_IDS])
        kept = counts != 0
        ids_P, order_P = ids[kept].sort()
        return AdmissionState(ids_P, counts[kept][order_P], b"")

    def load(self, table: int, state: AdmissionState) -> None:
        """Restore what `state` returned.

        Raises:
            ShapeError: a sketch where the rule counts exactly, or of another size.
        """
        sketch = self._sketches.get(table)
        checks.sketch(self._names[table], state.cells, 0 if sketch is None else sketch.nbytes)
        if sketch is not None:
            sketch.copy_(torch.frombuffer(bytearray(state.cells), dtype=torch.int32))
        elif table in self._exact:
            self._load_pairs(table, state.ids, state.counts)

    def _load_pairs(self, table: int, ids_P: Tensor, counts_P: Tensor) -> None:
        counts_P = counts_P.clamp(max=_LARGEST_COUNT).to(torch.int32)
        source = _Exact(len(ids_P), self._device)
        side = ids_P <= ERASED_KEY
        source.keys[: len(ids_P)] = ids_P.to(self._device)
        source.cells[: len(ids_P)] = counts_P.to(self._device)
        source.cells[(len(ids_P) + (ids_P[side] & 1)).to(self._device)] = counts_P[side].to(
            self._device
        )
        source.taken = len(ids_P)
        self._rebuild(table, source, 0)

    def _all(self, kind: int) -> list[int]:
        return [table for table, own in enumerate(self._kinds) if own == kind]

    def _words(self, table: int, exact: _Exact | None) -> list[int]:
        words = [0] * admission.COUNTER_WORDS
        rule, values = self._rules[table], self._values[table]
        words[admission.COUNTER_KIND] = self._kinds[table]
        words[admission.COUNTER_SALT] = to_signed(salt(self._names[table]))
        words[admission.COUNTER_VALUES] = values.values_L.data_ptr()
        words[admission.COUNTER_SHIFT], words[admission.COUNTER_SLOTS] = values.shift, values.mask
        if exact is not None:
            words[admission.COUNTER_KEYS] = exact.keys.data_ptr()
            words[admission.COUNTER_CELLS] = exact.cells.data_ptr()
            words[admission.COUNTER_MASK] = exact.slots - 1
        if table in self._sketches:
            words[admission.COUNTER_CELLS] = self._sketches[table].data_ptr()
            words[admission.COUNTER_MASK] = rule.sketch_width - 1
            words[admission.COUNTER_DEPTH] = rule.sketch_depth
        return words

    def _make_room(self, table: int, new: int) -> None:
        exact = self._exact[table]
        if exact.taken + new > _LOAD * exact.slots:
            self._rebuild(table, exact, new)
        self._exact[table].taken += new
        if self._report is not None:
            since = self._report[1]
            since[table] = since.get(table, 0) + new

    def _rebuild(self, table: int, source: _Exact, new: int) -> None:
        """Put a table's counts into a fresh index with room for as many again and `new` more."""
        kept = source.taken - source.erased
        slots = _FIRST_SLOTS
        while kept + new > _LOAD / 2 * slots:
            slots *= 2
        index = _Exact(slots, self._device)
        index.taken = kept
        words = sent(self._words(table, index), self._device)
        self._replace(table, index, words)
        move_counters(
            source.keys,
            source.cells,
            index.keys,
            index.cells,
            self._tables.tallies_KC[table],
            to_signed(salt(self._names[table])),
        )

    def _replace(self, table: int, index: _Exact, words_W: Tensor) -> None:
        """Allocates nothing, so that kernels never use the memory of a replaced index."""
        replaced = self._exact[table]
        retire(replaced.keys, replaced.cells)
        self._exact[table] = index
        self._tables.words_KW[table].copy_(words_W)
        self._tables.tallies_KC[table].zero_()
        # Tallies under way are of the index that was.
        self._report = None

    def _ask(self) -> None:
        """Send tallies to the host, unless some are on their way."""
        if self._report is None:
            self._report = copy_to_host(self._tables.tallies_KC, self._landing_KC), {}

    def _hear(self) -> None:
        """Tighten the bounds by tallies that have arrived."""
        if self._report is None or not self._report[0].arrived(wait=False):
            return
        tallies, since = self._report
        for table, exact in self._exact.items():
            taken, exact.erased = tallies.host[table].tolist()
            exact.taken = taken + since.get(table, 0)
        self._report = None


def _kind(rule: Admission) -> int:
    """Which counter a rule needs: none if every id gets a row at the first occurrence."""
    slots = [-1, *(slot for slot, _ in rule.per_slot)]
    if all(rule.required(slot) <= 1 for slot in slots):
        return admission.NONE
    return admission.SKETCH if rule.counter == "sketch" else admission.EXACT

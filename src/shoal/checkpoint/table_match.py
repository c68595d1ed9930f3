"""What of a checkpoint goes into which table: plain values, compared before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.checkpoint.manifest import SavedSegment, SavedTable
from shoal.errors import CheckpointError, TableFull
from shoal.rules.admission import Admission
from shoal.rules.optimizers import Optimizer
from shoal.table.spec import Segment, TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What of a checkpoint is loaded, and which differences are fine.

    Args:
        tables: "collection/table" of the tables to load; others are left alone. None: all.
        renames: key of a table of the model -> key that it was saved under.
        allow_missing: what the checkpoint may lack: "collection/table" (it starts empty),
            "collection/table.segment" (columns start with initial values), "module:name",
            "module:name.parameter", "optimizer:name" (each stays as it is).
            "collection/table.segment.state" starts state from scratch where the optimizer differs,
            and "collection/table.admission" counters where the admission differs.
        allow_unknown: what the checkpoint may have beyond the model, by the same names; it is
            not loaded.
        now_s: event time; rows that their table's expiry drops at it are left out.
        dense: whether modules and their optimizers are loaded.
        state: whether the state of optimizers is loaded, of rows and of modules. Without it
            optimizers may differ, and start from scratch.
    """

    tables: tuple[str, ...] | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    allow_missing: frozenset[str] = frozenset()
    allow_unknown: frozenset[str] = frozenset()
    now_s: int | None = None
    dense: bool = True
    state: bool = True


@dataclass(frozen=True, slots=True)
class SegmentMatch:
    """Columns of a table, and the saved ones that fill them.

    Args:
        segment: of the table.
        start, state_start: its first column of weights and of state.
        source, state_source: the same of the saved row; None: initial values, initial state.
    """

    segment: Segment
    start: int
    state_start: int
    source: int | None
    state_source: int | None


@dataclass(frozen=True, slots=True)
class TableMatch:
    """A table to load, and what it was saved as.

    Args:
        key: "collection/table" in the model.
        collection: of the model.
        spec: the whole table.
        saved: what the checkpoint has.
        segments: one per segment of `spec`.
        admission: whether its admission counters are loaded.
    """

    key: str
    collection: str
    spec: TableSpec
    saved: SavedTable
    segments: tuple[SegmentMatch, ...]
    admission: bool

    @property
    def same_hash(self) -> bool:
        """Whether rows have the hashes by which the checkpoint's files are split."""
        return self.spec.hash_name == self.saved.hash_name

    @property
    def same_columns(self) -> bool:
        """Whether a row's numbers are where they were."""
        kept = all(one.state_source == one.state_start for one in self.segments)
        return self.same_weights and kept

    @property
    def same_weights(self) -> bool:
        """Whether its weights are."""
        kept = all(one.source == one.start for one in self.segments)
        return self.saved.dim == self.spec.dim and kept


def saved_table(collection: str, spec: TableSpec, *, rows: int, deleted: int) -> SavedTable:
    """The saved form of a whole table."""
    segments = tuple(
        SavedSegment(one.name, one.dim, one.state_width, optimizer_kind(one.optimizer))
        for one in spec.segments
    )
    admission = admission_kind(spec.admission)
    return SavedTable(
        collection, spec.name, spec.hash_name, spec.dtype, segments, rows, deleted, admission
    )


def optimizer_kind(rule: Optimizer) -> str:
    """Name of a rule; of one that wraps another: "delay_compensated(adagrad)"."""
    inner = getattr(rule, "inner", None)
    return rule.kind if inner is None else f"{rule.kind}({optimizer_kind(inner)})"


def admission_kind(admission: Admission | None) -> str | None:
    """Kind and size of a table's counters: None, "exact" or "sketch <width>x<depth> by bucket"."""
    if admission is None or admission.counter == "exact":
        return None if admission is None else "exact"
    return f"sketch {admission.sketch_width}x{admission.sketch_depth} by bucket"


def match_tables(
    saved: Sequence[SavedTable], specs: Mapping[str, Sequence[TableSpec]], options: LoadOptions
) -> tuple[TableMatch, ...]:
    """Pair the tables of a checkpoint with those of a model.

    Args:
        saved: tables of the (last) manifest.
        specs: whole tables by collection.
        options: subset, renames and waivers.

    Raises:
        CheckpointError: tables, segments or optimizers differ and are not waived; it names all
            differences.
    """
    model = {f"{name}/{one.name}": (name, one) for name, those in specs.items() for one in those}
    there = {table.key: table for table in saved}
    problems = [*_wrong_names(model, there, options)]
    matches = []
    wanted = [key for key in model if options.tables is None or key in options.tables]
    for key in wanted:
        source = options.renames.get(key, key)
        if source not in there:
            if source == key and key not in options.allow_missing:
                problems.append(f"table {key!r} is not in it")
            continue
        collection, spec = model[key]
        segments = tuple(_segments(key, spec, there[source], options, problems))
        admission = _admission(key, spec, there[source], options, problems)
        matches.append(TableMatch(key, collection, spec, there[source], segments, admission))
    if options.tables is None:
        used = {match.saved.key for match in matches}
        problems += [
            f"table {key!r} of it is unknown to the model"
            for key in there
            if key not in used and key not in options.allow_unknown
        ]
    if problems:
        allowed = "the same tables, segments and optimizers, but for what is waived by name"
        raise differs("checkpoint and model", allowed, problems)
    return tuple(matches)


def check_capacity(match: TableMatch, rows: int, now_s: int | None) -> None:
    """Refuse a table that holds fewer rows than there are, before any is loaded.

    rows: at least so many will be loaded, unless some expire.

    Raises:
        TableFull: they do not fit and may not be evicted.
    """
    spec = match.spec
    expires = now_s is not None and spec.expiry is not None
    if spec.capacity_rows is None or spec.on_full != "raise" or expires:
        return
    if rows > spec.capacity_rows:
        raise TableFull(
            f"rows of table {match.key!r} in a checkpoint",
            got=rows,
            allowed=f"capacity_rows={spec.capacity_rows}",
            remedy="Raise capacity_rows, or set on_full to 'lru' or 'lfu'.",
        )


def _wrong_names(
    model: Collection[str], there: Collection[str], options: LoadOptions
) -> Iterator[str]:
    """Names in the options that stand for nothing: mistakes, which would go unseen."""
    for key in options.tables or ():
        if key not in model:
            yield f"table {key!r} to load is unknown to the model"
    for key, source in options.renames.items():
        if key not in model:
            yield f"renamed table {key!r} is unknown to the model"
        if source not in there:
            yield f"table {source!r}, renamed {key!r}, is not in it"


def _segments(
    key: str, spec: TableSpec, saved: SavedTable, options: LoadOptions, problems: list[str]
) -> Iterator[SegmentMatch]:
    places: dict[str, tuple[SavedSegment, int, int]] = {}
    at = state_at = 0
    for one in saved.segments:
        places[one.name] = (one, at, state_at)
        at, state_at = at + one.dim, state_at + one.state_width
    names = {segment.name for segment in spec.segments}
    problems += [
        f"segment '{key}.{name}' of it is unknown to the model"
        for name in places
        if name not in names and f"{key}.{name}" not in options.allow_unknown
    ]
    start = state_start = 0
    for segment in spec.segments:
        source = state_source = None
        if segment.name in places:
            one, source, state_source = places[segment.name]
            if one.dim != segment.dim:
                problems.append(
                    f"segment '{key}.{segment.name}' has dim {one.dim} in it, "
                    f"{segment.dim} in the model"
                )
            if not _same_state(key, segment, one, options, problems):
                state_source = None
        elif f"{key}.{segment.name}" not in options.allow_missing:
            problems.append(f"segment '{key}.{segment.name}' is not in it")
        yield SegmentMatch(segment, start, state_start, source, state_source)
        start, state_start = start + segment.dim, state_start + segment.state_width


def _same_state(
    key: str, segment: Segment, saved: SavedSegment, options: LoadOptions, problems: list[str]
) -> bool:
    if not options.state:
        return False
    kind = optimizer_kind(segment.optimizer)
    # Where dims differ, widths do, too: that is said once.
    width = segment.state_width if segment.dim == saved.dim else saved.state_width
    if (kind, width) == (saved.optimizer, saved.state_width):
        return True
    name = f"{key}.{segment.name}.state"
    if not _waived(name, options):
        problems.append(
            f"'{name}' is of {saved.optimizer} with {saved.state_width} floats a row in it, of "
            f"{kind} with {segment.state_width} in the model"
        )
    return False


def _admission(
    key: str, spec: TableSpec, saved: SavedTable, options: LoadOptions, problems: list[str]
) -> bool:
    kind = admission_kind(spec.admission)
    name = f"{key}.admission"
    if kind != saved.admission:
        if not _waived(name, options):
            problems.append(f"'{name}' is {saved.admission} in it, {kind} in the model")
        return False
    if kind is not None and kind != "exact" and spec.hash_name != saved.hash_name:
        if not _waived(name, options):
            problems.append(
                f"'{name}' is a sketch keyed by {saved.hash_name!r}, the table's is keyed by "
                f"{spec.hash_name!r}"
            )
        return False
    return kind is not None


def _waived(name: str, options: LoadOptions) -> bool:
    return name in options.allow_missing or name in options.allow_unknown


def differs(what: str, allowed: str, problems: Sequence[str]) -> CheckpointError:
    """The error that lists all differences of a checkpoint and the job that loads it."""
    return CheckpointError(
        what,
        got="".join(f"\n  - {problem}" for problem in problems) + "\n",
        allowed=allowed,
        remedy="Build the job as it was when it was saved, map names of tables with renames, or "
        "name what may differ in allow_missing and allow_unknown.",
    )

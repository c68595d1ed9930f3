"""`shoal init` and `shoal examples`: configs to begin with; `shoal --version`."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.shell import argument, console, option, print_line
from shoal.errors import ConfigError, DataError, unknown_name
from shoal.telemetry import replace_text

_LABELS = ("label", "target", "y", "click", "clicked", "is_click", "converted", "conversion")
_TIMES = ("time", "timestamp", "event_time", "event_time_s", "ts", "datetime", "date")
_SAMPLED = 100_000  # rows that are read to see what columns hold
_MANY = 100  # rows, no two of which have the same id: the id is of the row
_HELD_OUT = 0.9  # of the events train, later ones evaluate


def version(wanted: bool) -> None:
    """Print versions of this package, torch and Python, and the core's instruction set; exit."""
    if wanted:
        from importlib.metadata import version as version_of
        from platform import python_version

        from shoal._core import instruction_set

        shown = {name: version_of(name) for name in ("shoal", "torch")}
        shown |= {"Python": python_version(), "core": instruction_set()}
        print_line(console(), ", ".join(f"{name} {value}" for name, value in shown.items()))
        raise typer.Exit


def examples(
    name: Annotated[str | None, argument("[NAME]", "Example to copy, or all.")] = None,
    folder: Annotated[
        Path, argument("[DIR]", "Where to copy it; the folder examples if left out.")
    ] = Path("examples"),
) -> None:
    """List the example configs that come with the package, or copy one.

    Examples:

      shoal examples

      shoal examples flights && shoal train examples/flights.yaml
    """
    shipped = {path.stem: path for path in sorted(_examples_folder().glob("*.yaml"))}
    out = console()
    if name is None:
        for stem, path in shipped.items():
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            print_line(out, f"{stem:22} {first.removeprefix('# ')}")
        print_line(out, "Copy one with: shoal examples NAME")
        return
    wanted = [one for one in shipped if name in (one, "all")]
    if not wanted:
        raise unknown_name("example", name, [*shipped, "all"])
    # Files that an example names have its name first.
    prefix = "" if name == "all" else f"{name}_"
    for stem in [one for one in shipped if one == name or one.startswith(prefix)]:
        path = folder / f"{stem}.yaml"
        text = shipped[stem].read_text(encoding="utf-8")
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            print_line(out, f"wrote {path}")
        else:
            write(path, text, new=True)
    first = shipped[wanted[0]].read_text(encoding="utf-8")
    made = re.search(r"^#   (shoal data synth .*?) +#", first, flags=re.MULTILINE)
    if made:
        print_line(out, f"Make its data with: {made[1]}")
    print_line(out, f"Train it with: shoal train {folder / wanted[0]}.yaml")


def init(
    file: Annotated[Path, argument("FILE", "YAML file to write.")],
    data: Annotated[
        list[str] | None,
        option("FILE", "Parquet file to train on; may be repeated. The flights if left out."),
    ] = None,
    eval_data: Annotated[
        list[str] | None, option("FILE", "Parquet file to evaluate on; may be repeated.", "--eval")
    ] = None,
    label: Annotated[
        str | None, option("NAME", "Column of the label, 0 or 1; found by its name and values.")
    ] = None,
    time: Annotated[
        str | None, option("NAME", "Column of the event time, or none; found by its name and type.")
    ] = None,
) -> None:
    """Write a config to start from, which trains as it is: of the flights, or of Parquet files.

    Of Parquet files, text and integers become ids, floating numbers dense inputs. Without --eval,
    the last tenth of the events is for evaluation. Comments in the file name what is not used.

    Examples:

      shoal init my.yaml && shoal train my.yaml

      shoal init clicks.yaml --data clicks.parquet --label clicked --time at
    """
    if file.suffix != ".yaml":
        raise ConfigError("file to write", file, "a name that ends in .yaml", "Add .yaml.")
    note = ""
    if data:
        text, note = _starter(file, data, list(eval_data or ()), label, time)
    elif label or time or eval_data:
        allowed = "these three with --data"
        raise ConfigError("--label, --time and --eval", "no --data", allowed, "Add --data.")
    else:
        text = (_examples_folder() / "flights.yaml").read_text(encoding="utf-8")
        text = text.replace("examples/flights.yaml", str(file))
        text = text.replace("\nname: flights\n", f"\nname: {_quoted(_name_of(file))}\n")
    write(file, text, new=True)
    if note:
        print_line(console(), note)
    print_line(console(), f"Train it with: shoal train {file}")


def _examples_folder() -> Path:
    """In the installed package, or in a checkout."""
    package = Path(__file__).parents[1]
    return next(p for p in (package / "examples", package.parents[1] / "examples") if p.is_dir())


def write(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file whole or not at all, and say so; `new`: one that does not exist yet.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if new and path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")  # where it leads; a device
        else:
            replace_text(path, text)
    except OSError as error:
        raise ConfigError(
            "file to write",
            got=f"{path} ({error.strerror})",
            allowed=f"a {'new file' if new else 'file'} in a folder that can be written",
            remedy="Choose another name, or remove what is there.",
        ) from error
    print_line(console(), f"wrote {path}")


def _name_of(file: Path) -> str:
    """A run's name after a file."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in file.stem)
    return kept.lstrip("._-") or "run"


@dataclass(slots=True)
class _Found:
    """What columns of Parquet files are for."""

    label: str = ""
    time: str | None = None
    at: str | None = None  # the time that the files are split at
    ids: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # ids, some of them null
    dense: list[str] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=dict)  # by the reason

    def leave_out(self, name: str, reason: str) -> None:
        """Do not use a column."""
        self.unused.setdefault(reason, []).append(name)


def _starter(
    file: Path, paths: list[str], eval_paths: list[str], label: str | None, time: str | None
) -> tuple[str, str]:
    """A config of Parquet files, and what to know of it, if anything."""
    import pyarrow.parquet as pq

    from shoal.data.columns import check_present

    try:
        opened = [pq.ParquetFile(path) for path in (*paths, *eval_paths)]
        sample = next(opened[0].iter_batches(_SAMPLED), None)
    except (OSError, ValueError) as error:
        missing = [path for path in (*paths, *eval_paths) if not Path(path).is_file()]
        got = f"no file {missing[0]}" if missing else error
        remedy = "Check the paths of --data and --eval; write other files as Parquet first."
        raise DataError("data to start from", got, "Parquet files", remedy) from error
    for path, one in zip((*paths, *eval_paths), opened, strict=True):
        check_present(one.schema_arrow.names, one.schema_arrow.names, path)  # each once
    if sample is None:
        raise DataError("rows of the data", "none", "at least one", "Check --data.")
    names = sample.schema.names
    asked = None if time == "none" and time not in names else time
    for name, what in ((label, "--label"), (asked, "--time")):
        if name is not None and name not in names:
            raise unknown_name(f"column of the data for {what}", name, names)
    found = _Found(label=_label(sample, label))
    times = _times(sample, found.label) if time is None else [asked] if asked else []
    _split(found, times, paths, eval_paths, asked=asked is not None)
    _sort_columns(found, sample)
    _leave_out_nulls(found, opened)
    used = [found.label, *found.ids, *found.lists, *found.missing, *found.dense]
    for path, one in zip((*paths, *eval_paths), opened, strict=True):
        check_present(used, one.schema_arrow.names, path, "the files")
    if not (found.ids or found.lists or found.missing):
        got = ", ".join(map(repr, names))
        remedy = "Write ids as integers or text."
        raise DataError("id columns of the data", got, "one or more", remedy)
    note = ""
    if not (eval_paths or found.at):
        note = "Evaluation is of the training files, as no time splits them: name others by --eval."
    return _yaml(file, found, paths, eval_paths, note), note


def _sort_columns(found: _Found, sample: Any) -> None:
    """Say what each column is for that is not yet used or left out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from shoal.data.columns import Rows, decoded, floats, is_list

    known = {found.label, found.time, *(name for some in found.unused.values() for name in some)}
    alone: list[str] = []
    for name, kind in zip(sample.schema.names, sample.schema.types, strict=True):
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if name in known:
            continue
        if not (name and name.isprintable()):  # in configs no key is
            found.leave_out(name, "a name that is empty or not printable")
        elif is_list(kind) and _is_id(kind.value_type):
            found.lists.append(name)
        elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values = floats(decoded(sample[name]), name, Rows(""), pa.float32())
            if pc.any(pc.is_inf(values)).as_py():
                found.leave_out(name, "infinite, or beyond float32")
            else:
                found.dense.append(name)
        elif not _is_id(kind):
            found.leave_out(name, "neither ids nor numbers")
        else:
            column = decoded(sample[name])
            some = len(column) - column.null_count
            many = some >= _MANY and len(pc.unique(column.drop_null())) == some
            (alone if many else found.ids).append(name)
    if not (found.ids or found.lists):
        alone, found.ids = [], alone
    for name in alone:
        found.leave_out(name, "no two rows have the same")


def _is_id(kind: Any) -> bool:
    from shoal.ids import TEXT_TYPES

    return str(kind) in (*TEXT_TYPES, "bool") or str(kind).startswith(("int", "uint"))


def _label(sample: Any, asked: str | None) -> str:
    """The one column that a label's name or values have; the one asked for, if it is of 0 and 1."""
    import pyarrow.compute as pc

    binary = []
    for name, kind in zip(sample.schema.names, sample.schema.types, strict=True):
        if str(kind) == "bool" or str(kind).startswith(("int", "uint", "float", "double")):
            values = {value for value in pc.unique(sample[name]).to_pylist()[:3]}
            if values <= {0, 1}:
                binary.append(name)
    if asked is not None:
        if asked not in binary:
            shown = ", ".join(repr(value) for value in sample[asked][:4].to_pylist())
            raise ConfigError(
                f"label {asked!r} of the data",
                got=f"{sample[asked].type}: {shown[:100]}, ...",
                allowed="numbers 0 and 1, none missing",
                remedy="Write such a column, or name another with --label.",
            )
        return asked
    named = [name for name in sample.schema.names if name.lower() in _LABELS]
    found = [name for name in named or binary if name in binary]
    if len(found) != 1:
        got = f"columns of 0 and 1: {', '.join(binary) or 'none'}"
        got += f"; with a label's name: {', '.join(named)}" if named else ""
        allowed = "one column that says what happened"
        raise ConfigError("label of the data", got, allowed, "Name it with --label.")
    return str(found[0])


def _times(sample: Any, label: str) -> list[str]:
    """Columns of times, then those of whole seconds with a time's name."""
    kinds = dict(zip(sample.schema.names, map(str, sample.schema.types), strict=True))
    stamps = [name for name, kind in kinds.items() if kind.startswith("timestamp")]
    named = [
        name
        for name, kind in kinds.items()
        if name.lower() in _TIMES
        and name != label
        and (kind.startswith("date") or kind in ("int32", "int64", "uint32", "uint64"))
    ]
    return [*stamps, *named]


def _split(
    found: _Found, times: list[str], paths: list[str], eval_paths: list[str], *, asked: bool
) -> None:
    """Take the first of these columns that can be read as times, and split by it without --eval.

    The last tenth is from the split on; there is none if all events are at one time.

    Raises:
        DataError: the one that was asked for cannot be read.
    """
    import numpy as np

    for name in times:
        try:
            seconds = np.sort(np.concatenate([_seconds(path, name) for path in paths]))
            for path in eval_paths:
                _seconds(path, name)
        except DataError as error:
            if asked:
                raise
            found.leave_out(name, f"no time ({' '.join(str(error).split())})")
            continue
        found.time = name
        at = int(seconds[int(len(seconds) * _HELD_OUT)])
        if not eval_paths and at != seconds[0]:
            found.at = datetime.fromtimestamp(at, timezone.utc).isoformat()
        return


def _seconds(path: str, time: str) -> Any:
    """The times of a file."""
    import pyarrow.parquet as pq

    from shoal.data.columns import Rows, check_present, decoded, times

    check_present([time], pq.read_schema(path).names, path)
    return times(decoded(pq.read_table(path, columns=[time])[time]), time, Rows(path)).numpy()


def _leave_out_nulls(found: _Found, opened: list[Any]) -> None:
    """Ids that are null in some row get a default; lists with a null in one are not used."""
    nulls = set()  # paths of what is null in some row, or of which no file says
    for file in opened:
        for group in range(file.metadata.num_row_groups):
            for index in range(file.metadata.num_columns):
                column = file.metadata.row_group(group).column(index)
                stats = column.statistics
                if stats is None or not stats.has_null_count or stats.null_count:
                    nulls.add(column.path_in_schema)
    found.missing = [name for name in found.ids if name in nulls]
    found.ids = [name for name in found.ids if name not in nulls]
    for name in list(found.lists):
        # Also an empty list counts as a null.
        if any(path.startswith(f"{name}.") for path in nulls) and any(
            batch[name].flatten().null_count
            for file in opened
            if name in file.schema_arrow.names
            for batch in file.iter_batches(columns=[name])
        ):
            found.lists.remove(name)
            found.leave_out(name, "null in some list")


def _quoted(text: str) -> str:
    """A text as YAML on one line, whatever is in it."""
    import yaml  # type: ignore[import-untyped]

    dumped = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=float("inf"))
    return str(dumped).rstrip("\n")


def _value(text: str) -> str:
    """A text as a value, in which no other setting is looked up."""
    return _quoted(text.replace("${", "\\${"))


def _listed(texts: Iterable[str]) -> str:
    return "[" + ", ".join(map(_value, texts)) + "]"


def _yaml(file: Path, found: _Found, paths: list[str], eval_paths: list[str], note: str) -> str:
    """The config's text, with what to think of next as comments."""
    rows = [
        f"# Made by shoal init from {_quoted(os.path.basename(paths[0]))}. Train with:",
        f"#   shoal train {' '.join(str(file).split())}",
        "# All settings of this run, with their defaults: shoal train FILE --print-config",
        f"name: {_quoted(_name_of(file))}",
        "",
        "data:",
        "  source:",
        "    kind: parquet",
        f"    paths: {_listed(paths)}",
    ]
    if note:
        rows.append(f"    # {note}")
    if found.at is None:
        rows.append(f"    eval_paths: {_listed(eval_paths or paths)}")
    rows.append(f"    label: {_value(found.label)}")
    if found.time is not None:
        rows.append(f"    time: {_value(found.time)}")
    if found.dense:
        rows += [f"    dense: {_listed(found.dense)}", "    dense_fill: 0.0  # for null and NaN"]
    if found.ids or found.lists:
        rows.append("    ids:")
        rows += [f"      {_quoted(name)}: {{}}" for name in found.ids]
        rows += [f"      {_quoted(name)}: {{is_list: true}}" for name in found.lists]
    if found.missing:
        rows.append("    features:  # ids that are missing in some rows")
        rows += [f"      {_quoted(name)}: {{kind: id, default: ''}}" for name in found.missing]
    for reason, names in found.unused.items():
        rows.append(f"    # Not used, {reason}: {', '.join(map(_quoted, names))}")
    if found.at is not None:
        rows.append(f"  split: {found.at}  # train before, evaluate from then on")
    rows += [
        "  batch_size: 512",
        "",
        "tables:",
        "  default:",
        "    dim: 16",
        "    optimizer: {kind: adagrad, lr: 0.05}",
        "",
        "model: {kind: deepfm, hidden: [64, 32]}",
        "dense_optimizer: {kind: adam, lr: 0.001}",
    ]
    return "\n".join(rows) + "\n"

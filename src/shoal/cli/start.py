"""`shoal init` and `shoal examples`: configs to begin with; `shoal --version`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.shell import Debug, argument, clean_errors, console, option, print_line
from shoal.errors import ConfigError, DataError, unknown_name

_LABELS = ("label", "target", "y", "click", "clicked", "is_click", "converted", "conversion")
_TIMES = ("time", "timestamp", "event_time", "event_time_s", "ts", "datetime", "date")
_SAMPLED = 100_000  # rows that are read to see which numbers are labels
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
    debug: Debug = False,
) -> None:
    """List the example configs that come with the package, or copy one.

    Examples:

      shoal examples

      shoal examples flights && shoal train examples/flights.yaml
    """
    with clean_errors(debug):
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
            if not (path.is_file() and path.read_text(encoding="utf-8") == text):
                _write_new(path, text)
            print_line(out, f"wrote {path}")
        print_line(out, f"Train it with: shoal train {folder / wanted[0]}.yaml")


def init(
    file: Annotated[Path, argument("FILE", "YAML file to write.")],
    data: Annotated[
        list[str] | None,
        option("FILE", "Parquet file to train on; may be repeated. The flights if left out."),
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        option("FILE", "Parquet file to evaluate on; may be repeated.", "--eval"),
    ] = None,
    label: Annotated[
        str | None, option("NAME", "Column of the label, 0 or 1; found by its name and values.")
    ] = None,
    time: Annotated[
        str | None, option("NAME", "Column of the event time; found by its name and type.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a config to start from, which trains as it is: of the flights, or of Parquet files.

    Of Parquet files, text and integers become ids, floating numbers dense inputs. Without --eval,
    the last tenth of the events is for evaluation.

    Examples:

      shoal init my.yaml && shoal train my.yaml

      shoal init clicks.yaml --data clicks.parquet --label clicked --time at
    """
    with clean_errors(debug):
        if file.suffix != ".yaml":
            raise ConfigError("file to write", file, "a name that ends in .yaml", "Add .yaml.")
        if data:
            text = _starter(file, data, list(eval_data or ()), label, time)
        elif label or time or eval_data:
            allowed = "these three with --data"
            raise ConfigError("--label, --time and --eval", "no --data", allowed, "Add --data.")
        else:
            text = (_examples_folder() / "flights.yaml").read_text(encoding="utf-8")
            text = text.replace("examples/flights.yaml", str(file))
            text = text.replace("\nname: flights\n", f"\nname: {_name_of(file)}\n")
        _write_new(file, text)
        print_line(console(), f"wrote {file}")
        print_line(console(), f"Train it with: shoal train {file}")


def _examples_folder() -> Path:
    """In the installed package, or in a checkout."""
    package = Path(__file__).parents[1]
    return next(p for p in (package / "examples", package.parents[1] / "examples") if p.is_dir())


def _write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            "file to write",
            got=f"{path} ({error.strerror})",
            allowed="a new file in a folder that can be written",
            remedy="Choose another name, or remove the file.",
        ) from error


def _name_of(file: Path) -> str:
    """A run's name after a file."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in file.stem)
    return kept.lstrip("._-") or "run"


@dataclass(slots=True)
class _Found:
    """What columns of Parquet files are for."""

    label: str = ""
    time: str | None = None
    ids: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # ids, some of them null
    dense: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def _starter(
    file: Path, paths: list[str], eval_paths: list[str], label: str | None, time: str | None
) -> str:
    """A config of Parquet files."""
    import pyarrow.parquet as pq

    try:
        opened = [pq.ParquetFile(path) for path in paths]
        sample = next(opened[0].iter_batches(_SAMPLED), None)
    except (OSError, ValueError) as error:
        missing = [path for path in paths if not Path(path).is_file()]
        got = f"no file {missing[0]}" if missing else error
        remedy = "Check the path after --data; write other files as Parquet first."
        raise DataError("data to start from", got, "Parquet files", remedy) from error
    if sample is None:
        raise DataError("rows of the data", "none", "at least one", "Check --data.")
    found = _columns(sample, label, time)
    nulls = _with_nulls(opened)
    found.missing = [name for name in found.ids if name in nulls]
    found.ids = [name for name in found.ids if name not in nulls]
    if not (found.ids or found.lists or found.missing):
        got = ", ".join(map(repr, sample.schema.names))
        remedy = "Write ids as integers or text."
        raise DataError("id columns of the data", got, "one or more", remedy)
    at = None if eval_paths or found.time is None else _split(paths, found.time)
    return _yaml(file, found, paths, eval_paths, at)


def _columns(sample: Any, label: str | None, time: str | None) -> _Found:
    import pyarrow as pa

    names, types = list(sample.schema.names), pa.types
    for asked, what in ((label, "--label"), (time, "--time")):
        if asked is not None and asked not in names:
            raise unknown_name(f"column of the data for {what}", asked, names)
    found = _Found(label=label or _label(sample))
    found.time = time or _time(sample, found.label)
    for name, kind in zip(names, sample.schema.types, strict=True):
        if types.is_dictionary(kind):
            kind = kind.value_type
        if name in (found.label, found.time):
            continue
        if types.is_list(kind) or types.is_large_list(kind):
            (found.lists if _is_id(kind.value_type) else found.unused).append(name)
        elif types.is_floating(kind) or types.is_decimal(kind):
            found.dense.append(name)
        else:
            (found.ids if _is_id(kind) else found.unused).append(name)
    return found


def _is_id(kind: Any) -> bool:
    from shoal.ids import TEXT_TYPES

    return str(kind) in (*TEXT_TYPES, "bool") or str(kind).startswith(("int", "uint"))


def _label(sample: Any) -> str:
    """The one column that a label's name or values have."""
    import pyarrow.compute as pc

    binary = []
    for name, kind in zip(sample.schema.names, sample.schema.types, strict=True):
        if str(kind) == "bool" or str(kind).startswith(("int", "uint", "float", "double")):
            values = {value for value in pc.unique(sample[name]).to_pylist()[:3]}
            if values <= {0, 1}:
                binary.append(name)
    known = [name for name in binary if name.lower() in _LABELS]
    if len(known or binary) != 1:
        raise ConfigError(
            "label of the data",
            got=f"columns of 0 and 1: {', '.join(binary) or 'none'}",
            allowed="one column that says what happened",
            remedy="Name it with --label.",
        )
    return str((known or binary)[0])


def _time(sample: Any, label: str) -> str | None:
    """A column of times, or of whole seconds with a time's name."""
    kinds = dict(zip(sample.schema.names, map(str, sample.schema.types), strict=True))
    stamps = [name for name, kind in kinds.items() if kind.startswith("timestamp")]
    named = [
        name
        for name, kind in kinds.items()
        if name.lower() in _TIMES
        and name != label
        and (kind.startswith("date") or kind in ("int32", "int64", "uint32", "uint64"))
    ]
    return next(iter([*stamps, *named]), None)


def _with_nulls(opened: Iterable[Any]) -> set[str]:
    """Columns that are null in some row, or for which no file says."""
    found = set()
    for file in opened:
        for group in range(file.metadata.num_row_groups):
            for index in range(file.metadata.num_columns):
                column = file.metadata.row_group(group).column(index)
                stats = column.statistics
                if stats is None or not stats.has_null_count or stats.null_count:
                    found.add(column.path_in_schema.partition(".")[0])
    return found


def _split(paths: list[str], time: str) -> str | None:
    """The time from which on events are the last tenth; None if all are at one time."""
    import numpy as np
    import pyarrow.parquet as pq

    from shoal.data.columns import Rows, decoded, times

    read = [decoded(pq.read_table(path, columns=[time])[time]) for path in paths]
    every = [times(one, time, Rows(path)) for path, one in zip(paths, read, strict=True)]
    seconds = np.sort(np.concatenate([one.numpy() for one in every]))
    at = int(seconds[int(len(seconds) * _HELD_OUT)])
    return None if at == seconds[0] else datetime.fromtimestamp(at, timezone.utc).isoformat()


def _yaml(
    file: Path, found: _Found, paths: list[str], eval_paths: list[str], at: str | None
) -> str:
    """The config's text, with what to think of next as comments."""
    import json

    def listed(names: Iterable[str]) -> str:
        return "[" + ", ".join(json.dumps(name, ensure_ascii=False) for name in names) + "]"

    rows = [
        f"# Made by shoal init from {os.path.basename(paths[0])}. Train with: shoal train {file}",
        "# All settings: docs/guide/config.md. All of this run: shoal train FILE --print-config",
        f"name: {_name_of(file)}",
        "",
        "data:",
        "  source:",
        "    kind: parquet",
        f"    paths: {listed(paths)}",
    ]
    if at is None:
        if not eval_paths:
            rows.append("    # No column of times, so the same examples: name held-out files.")
        rows.append(f"    eval_paths: {listed(eval_paths or paths)}")
    rows.append(f"    label: {json.dumps(found.label)}")
    if found.time is not None:
        rows.append(f"    time: {json.dumps(found.time)}")
    if found.dense:
        rows += [f"    dense: {listed(found.dense)}", "    dense_fill: 0.0  # for null and NaN"]
    if found.ids or found.lists:
        rows.append("    ids:")
        rows += [f"      {json.dumps(name)}: {{}}" for name in found.ids]
        rows += [f"      {json.dumps(name)}: {{is_list: true}}" for name in found.lists]
    if found.missing:
        rows.append("    features:  # ids that are missing in some rows")
        rows += [f"      {json.dumps(name)}: {{kind: id, default: ''}}" for name in found.missing]
    if found.unused:
        rows.append(f"    # Not used, as neither ids nor numbers: {', '.join(found.unused)}")
    if at is not None:
        rows.append(f"  split: {at}  # train before, evaluate from then on")
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

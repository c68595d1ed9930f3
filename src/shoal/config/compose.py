"""From a YAML file, SHOAL_* variables and `key=value` overrides to a `RunConfig`, on all ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.comm import consensus
from shoal.comm.collectives import Collectives
from shoal.config.tree import RunConfig
from shoal.config.type_words import allowed_by, names_of, shown
from shoal.config.yaml_limits import check_growth, check_override, check_values, read_checked
from shoal.errors import ConfigError, ShoalError, UnknownName, did_you_mean, unknown_name

Tree = TypeVar("Tree", bound=BaseModel)

ENVIRONMENT: Mapping[str, str] = {
    "SHOAL_DEVICE": "device",
    "SHOAL_OUTPUT_DIR": "output.dir",
    "SHOAL_PS": "distributed.servers.addresses",
    "SHOAL_SEED": "seed",
    "SHOAL_THREADS": "threads",
}
"""SHOAL_* variable -> the key that it sets."""

_REMOVED = {"data.pace": "data.replay"}  # older run folders name them, as null


def load(
    path: str | Path, overrides: Sequence[str] = (), *, environment: Mapping[str, str] | None = None
) -> RunConfig:
    """Compose a config file with the environment and overrides, and validate it.

    Args:
        path: a YAML file; its folder is Hydra's search path.
        overrides: `key=value`, `~key` (delete), in Hydra's grammar; `key` may be absent from
            the file, as long as the tree has it.
        environment: variables to read; the process's own when left out.

    Raises:
        UnknownName: a key that the tree does not have; lists the nearest.
        ConfigError: no such file, bad YAML, a bad override, a value of the wrong type.
    """
    found = _from_environment(os.environ if environment is None else environment)
    settings = compose_file(path, [*found, *overrides])
    return from_mapping({"name": Path(path).stem} | settings)


def compose_file(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a YAML file and overrides say together, as plain settings; reads no variables.

    Args:
        path: a YAML file; its folder is Hydra's search path.
        overrides: `key=value`, `~key` (delete) or `group=name`, in Hydra's grammar.

    Raises:
        ConfigError: no such file, bad YAML, a bad override.
    """
    try:
        file = Path(path).resolve()
        found = file.is_file() and file.suffix == ".yaml"
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or links in a ring
        found = False
    if not found:
        raise ConfigError(
            "config file",
            got=str(path)[:200],
            allowed="the path of an existing .yaml file",
            remedy="Write one with shoal init FILE.yaml, or copy one: shoal examples.",
        )
    for text in overrides:
        check_override(text)
    try:
        settings = _composed(file, overrides)
    except ShoalError:
        raise
    except Exception as error:  # of parsers of other packages, which raise whatever they meet
        raise ConfigError(
            f"config {path}",
            got=_reason(error)[:1000],
            allowed="YAML in UTF-8, and overrides of keys that exist",
            remedy="Correct the file or the override named above.",
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(
            "config",
            got=type(settings).__name__,
            allowed="key: value pairs",
            remedy="Start from one that shoal init writes.",
        )
    return settings


def _reason(error: Exception) -> str:
    """What another package's error says; of an override, the key and what was wrong with it."""
    merged = re.fullmatch(r"Error merging override \+*(.*)", str(error), re.DOTALL)
    cause = str(error.__cause__).partition("\n")[0]
    for theirs, ours in (("DictConfig", "settings"), ("ListConfig", "a list")):
        cause = cause.replace(theirs, ours)
    text = f"{merged[1]} ({cause})" if merged else str(error) or repr(error.__cause__)
    return " ".join(text.split())


def _load_checked(source: Any, load_config: Callable[[str], Any], config_path: str) -> Any:
    """What Hydra loads of a folder: it may be any file that a `defaults` list names."""
    read_checked(Path(source.path) / source._normalize_file_name(config_path))
    return load_config(config_path)


def _composed(file: Path, overrides: Sequence[str]) -> Any:
    parsed = [_parsed(text) for text in overrides]
    with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        for source in loader.repository.sources:
            if source.scheme() == "file":
                source.load_config = partial(_load_checked, source, source.load_config)
        # Composing takes a while: without overrides that replace parts, once is enough.
        alone = compose(file.stem) if any(_replaces(one) for one in parsed) else DictConfig({})
        tree = compose(file.stem, overrides=_forced(parsed, alone, file.parent))
    check_growth(OmegaConf.to_container(tree, resolve=False))
    return OmegaConf.to_container(tree, resolve=True)


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """Validate plain settings; `tables.default` is spread over the other tables.

    Raises:
        UnknownName: a key that the tree does not have; lists the nearest.
        ConfigError: a value that is missing or of the wrong type.
    """
    settings = _without_removed(settings)
    tables = settings.get("tables")
    if isinstance(tables, Mapping) and isinstance(tables.get(RunConfig.DEFAULT_TABLE), Mapping):
        base = tables[RunConfig.DEFAULT_TABLE]
        spread = {RunConfig.DEFAULT_TABLE: base} | {
            name: {**base, **own} if isinstance(own, Mapping) else own
            for name, own in tables.items()
        }
        settings = {**settings, "tables": spread}
    return validate(RunConfig, settings)


def _without_removed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for path, instead in _REMOVED.items():
        part, _, key = path.partition(".")
        own = settings.get(part)
        if not isinstance(own, Mapping) or key not in own:
            continue
        if own[key] is not None:
            allowed, remedy = f"none: it is {instead} now", "Set that instead."
            raise ConfigError(f"config key {path}", own[key], allowed, remedy)
        settings = {**settings, part: {name: own[name] for name in own if name != key}}
    return settings


def validate(tree: type[Tree], settings: Mapping[str, Any]) -> Tree:
    """Plain settings as a tree of pydantic's, say one of `Section`s, which know their keys.

    Raises:
        UnknownName: a key that a section does not have; lists the nearest.
        ConfigError: a value that is missing or of the wrong type.
    """
    check_values(settings)
    try:
        return tree.model_validate(settings)
    except ValidationError as error:
        raise _translate(error, settings) from error


def to_yaml(config: BaseModel) -> str:
    """The resolved tree as YAML that reads back to an equal tree."""
    return str(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))))


def _from_environment(environment: Mapping[str, str]) -> list[str]:
    found = sorted(name for name in environment if name.startswith("SHOAL_") and environment[name])
    for name in found:
        if name not in ENVIRONMENT:
            raise unknown_name(
                "environment variable", name, ENVIRONMENT, remedy="Unset it, or use one of these."
            )
    values = {name: environment[name] for name in found}
    if "SHOAL_PS" in values:
        values["SHOAL_PS"] = f"[{values['SHOAL_PS']}]"  # HOST:PORT,HOST:PORT
    return [f"{ENVIRONMENT[name]}={value}" for name, value in values.items()]


def _parsed(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            "override",
            got=repr(text),
            allowed="key=value or ~key, such as model.dropout=0.1 or ~features.history",
            remedy="Quote values that hold commas, spaces or brackets.",
        ) from error


def _replaces(override: Override) -> bool:
    """Whether it gives a mapping with a kind."""
    value = None if override.is_delete() else override.value()
    return isinstance(value, dict) and any(str(part) == "kind" for part in value)


_PLACEMENT = "distributed.placement"


def _forced(overrides: Sequence[Override], alone: DictConfig, folder: Path) -> list[str]:
    """Let overrides name keys that the file leaves to their defaults; the tree checks them.

    `key={kind: ..., ...}` replaces what the file says under the key, as another kind has other
    settings; other mappings are merged, as Hydra does. Names of config groups stay Hydra's.
    """
    forced: list[str] = []
    for override in overrides:
        key, text = override.get_key_element(), str(override.input_line)
        if override.is_add() or override.is_delete() or (folder / key).is_dir():
            forced.append(text)
            continue
        if key == _PLACEMENT and isinstance(override.value(), str):
            # Short for its default: next to types of tables neither override may replace the other.
            text = text.replace(key, f"{key}.default", 1)
        if _replaces(override) and OmegaConf.select(alone, key) is not None:
            forced.append(f"~{key}")
        forced.append(f"++{text.lstrip('+')}")
    return forced


def _translate(error: ValidationError, settings: Mapping[str, Any]) -> ShoalError:
    """The first problem as one of ours, with the dotted path of the key."""
    first = error.errors()[0]
    path = ".".join(_location(first, settings))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UnknownName) and len(cause.args) == 3:
        _, key, known = cause.args
        prefix = f"{path}." if path else ""
        return unknown_name("config key", prefix + key, [prefix + name for name in known])
    if isinstance(cause, UnknownName):
        return UnknownName(f"{path}: {cause}" if path else str(cause))
    if isinstance(cause, ShoalError):
        return ConfigError(f"{path}: {cause}" if path else str(cause))
    if first["type"] == "union_tag_invalid":
        known = first["ctx"]["expected_tags"].replace("'", "").split(", ")
        return unknown_name(f"kind of {path}", str(first["ctx"]["tag"]), known)
    # One error for each type that the setting may have.
    own = [one for one in error.errors() if ".".join(_location(one, settings)) == path]
    names = [name for one in own for name in names_of(one)]
    return ConfigError(
        f"config key {path}",
        got="nothing" if first["type"] == "missing" else shown(first["input"])[:200],
        allowed=allowed_by(own),
        remedy=did_you_mean(str(first["input"]), names)
        or "Correct it in the file or on the command line.",
    )


def _location(error: ErrorDetails, settings: Any) -> list[str]:
    """The keys of an error's location; names of union members in it are left out."""
    parts: list[str] = []
    here: Any = settings
    for part in error["loc"]:
        in_mapping = isinstance(here, Mapping) and part in here
        in_list = isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)
        if in_mapping or in_list:
            here = here[part]
            parts.append(str(part))
    if error["type"] == "missing":
        parts.append(str(error["loc"][-1]))
    return parts


def load_synced_config(control: Collectives, load: Callable[[], Tree]) -> Tree:
    """The config that rank 0 loads, on every rank; nothing has started when this raises.

    Files and SHOAL_* variables of the other ranks are not read.

    Args:
        control: collectives between the hosts of all ranks.
        load: reads the config; called on rank 0 only.

    Raises:
        ShoalError: what rank 0 raised, on every rank; a ConfigError that names any other error.
        ConfigError: ranks that got different configs: other versions of this package.
        CollectiveFailed: a rank died or did not come in time.
    """
    found = consensus.as_first_rank(control, load, what="config of rank 0")
    require_same(control, found)
    return found


def require_same(control: Collectives, config: BaseModel) -> None:
    """Check that every rank has the same settings; a collective call.

    Args:
        control: the collectives of all ranks.
        config: this rank's settings.

    Raises:
        ConfigError: on every rank, if any differ; it names the lines.
        CollectiveFailed: a rank died or did not come in time.
    """

    def lines(theirs: str, first: str) -> tuple[str, str]:
        there, here = theirs.splitlines(), first.splitlines()
        extra = [[x for x in a if x not in b][:5] for a, b in ((there, here), (here, there))]
        more, less = ("; ".join(x.strip() for x in found) or "less" for found in extra)
        return more, less

    remedy = "Start every rank with the same file, variables, overrides and version."
    consensus.require_same(
        control, "config over ranks", to_yaml(config), remedy=remedy, shown=lines
    )

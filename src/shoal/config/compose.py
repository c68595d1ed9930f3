"""From a YAML file, SHOAL_* variables and `key=value` overrides to a `RunConfig`, on all ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.comm import consensus
from shoal.comm.collectives import Collectives
from shoal.config.short_forms import long_form
from shoal.config.tree import RunConfig
from shoal.config.type_words import allowed_by, names_of, shown
from shoal.config.yaml_limits import (
    check_growth,
    check_nodes,
    check_override,
    check_values,
    read_checked,
)
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
    settings = compose_file(path, [*found, *overrides], RunConfig)
    return from_mapping({"name": Path(path).stem} | settings)


def compose_file(
    path: str | Path, overrides: Sequence[str] = (), tree: type[BaseModel] = BaseModel
) -> dict[str, Any]:
    """What a YAML file and overrides say together, as plain settings; reads no variables.

    Args:
        path: a YAML file; its folder is Hydra's search path.
        overrides: `key=value`, `~key` (delete) or `group=name`, in Hydra's grammar.
        tree: what the settings are of; values that are short for settings there are written out.

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
        settings = _composed(file, overrides, tree)
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


def _composed(file: Path, overrides: Sequence[str], tree: type[BaseModel]) -> Any:
    parsed = [_parsed(text) for text in overrides]
    groups = [one for one in parsed if _is_hydras(one, file.parent)]
    with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        for source in loader.repository.sources:
            if source.scheme() == "file":
                source.load_config = partial(_load_checked, source, source.load_config)
        files = [DictConfig({})]
        merge = partial(_merge_file, files, tree, loader._embed_result_config)
        loader._embed_result_config = merge
        compose(file.stem, overrides=[str(one.input_line) for one in groups])
    config = files[0]
    config.pop("hydra", None)
    for one in parsed:
        if one not in groups:
            config = _long(config, tree)
            _apply(one, config, tree)
    check_growth(OmegaConf.to_container(config, resolve=False))
    return OmegaConf.to_container(config, resolve=True)


def _merge_file(
    files: list[Any], tree: type[BaseModel], embed: Callable[..., Any], *given: Any
) -> Any:
    """Merge a file into `files[0]` in place of Hydra, which would put settings over short forms."""
    ours = given[0].provider == "main"
    if ours:
        given[0].config.pop("defaults", None)
    part = embed(*given)
    if ours:
        files[0] = OmegaConf.merge(_long(files[0], tree), part.config)
        part.config = DictConfig({})
    return part


def _long(config: DictConfig, tree: type[BaseModel]) -> DictConfig:
    return DictConfig(long_form(OmegaConf.to_container(config, resolve=False), tree))


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
        parsed: Override | None = OverridesParser.create().parse_override(text)
    except HydraException:
        parsed = _parsed_pattern(text)
    if parsed is None or parsed.is_sweep_override():
        raise ConfigError(
            "override",
            got=repr(text),
            allowed="key=value or ~key, such as model.dropout=0.1 or ~features.history",
            remedy="Quote values that hold commas, spaces or brackets.",
        )
    return parsed


def _parsed_pattern(text: str) -> Override | None:
    """Patterns of names, whether in the key or quoted in {...}, which Hydra's grammar lacks."""
    found = re.fullmatch(r"(~|\+{0,2})([\w.*?-]+)(=(.*))?", text, re.DOTALL)
    if not found or not (re.search("[*?]", found[2]) or str(found[4]).startswith("{")):
        return None
    mark, key, given, value = found.groups()
    if not given:
        return replace(_parsed("~x"), key_or_group=key, input_line=text) if mark == "~" else None
    check_nodes(value, f"override {text[:40]!r}")
    read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    plain = replace(_parsed(f"{mark}x=0"), key_or_group=key, input_line=text)
    return replace(plain, _value=read["value"])


def _is_hydras(override: Override, folder: Path) -> bool:
    """Whether it chooses a file of a config group, or is of Hydra itself."""
    is_group = override.package is not None or (folder / override.key_or_group).is_dir()
    return is_group or override.is_hydra_override()


def _apply(override: Override, config: DictConfig, tree: type[BaseModel]) -> None:
    """Merge an override into a config; its key may be one that only the tree has.

    A mapping with a kind replaces what is there, as another kind has other settings; other
    mappings are merged. A text that is short for a mapping counts as that.
    """
    value: Any = override.value()
    path = override.key_or_group.split(".")
    if not override.is_delete():
        if isinstance(value, str):
            nested: Any = value
            for part in reversed(path):
                nested = {part: nested}
            value = reduce(getitem, path, long_form(nested, tree))
        whole = not isinstance(value, dict) or "kind" in value
        _require_no_plain_value(override, path[:-1] if whole else path, config)
        if whole and isinstance(value, dict):
            OmegaConf.update(config, override.key_or_group, None)
        kind = override.type if override.is_add() else OverrideType.FORCE_ADD
        override = replace(override, type=kind, _value=value)
    ConfigLoaderImpl._apply_overrides_to_config([override], config)


def _require_no_plain_value(override: Override, path: list[str], config: DictConfig) -> None:
    """Refuse settings in what is a number or a text, which they would replace."""
    here: Any = OmegaConf.to_container(config, resolve=False)
    for depth, part in enumerate(path, 1):
        here = here.get(part) if isinstance(here, dict) else None
        if here is not None and not isinstance(here, dict | list):
            key = ".".join(path[:depth])
            raise ConfigError(
                f"override {override.input_line}",
                got=f"{key}: {shown(here)} before it",
                allowed=f"settings: {key}={{NAME: VALUE}}",
                remedy=f"Write all of {key} in one, or leave its plain value out.",
            )


def _translate(error: ValidationError, settings: Mapping[str, Any]) -> ShoalError:
    """The first problem as one of ours, with the dotted path of the key."""
    first = error.errors()[0]
    path = ".".join(_location(first, settings))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UnknownName) and len(cause.args) == 3:
        _, key, known = cause.args
        prefix = f"{path}." if path else ""
        remedy = "" if did_you_mean(key, known) else _without(path, key, first["input"])
        names = [prefix + name for name in known]
        return unknown_name("config key", prefix + key, names, remedy=remedy)
    if isinstance(cause, UnknownName):
        remedy = _without(path, str(cause.args[-1]), first["input"])
        return UnknownName(f"{path}: {cause} {remedy}".rstrip() if path else str(cause))
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


def _without(path: str, key: str, settings: Any) -> str:
    """How to be rid of a setting that the settings' kind does not have."""
    if not isinstance(settings, Mapping) or "kind" not in settings or key not in settings:
        return ""
    kind = settings["kind"]
    return f"If it is another kind's, write {path}={kind}, or remove it with ~{path}.{key}."


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

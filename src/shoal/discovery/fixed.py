"""Addresses that are known before a job starts: a list, or the variable TF_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.discovery.values import check_address, check_index, read_only
from shoal.errors import ConfigError


class StaticList:
    """The addresses of one role, by index.

    Args:
        addresses: HOST:PORT each.
        role: whose they are.

    Raises:
        ConfigError: one of them is no address, or two are the same.
    """

    def __init__(self, addresses: Sequence[str], role: str = "ps") -> None:
        self._role = role
        self._book = dict(enumerate(_checked(addresses, f"address of a {role}")))

    def register(self, role: str, index: int, address: str, *, replace: bool = True) -> bool:
        """Whoever is in the list is registered."""
        return read_only("a list of addresses", role, index, address, self.query(role))

    def query(self, role: str) -> dict[int, str]:
        """Who is there: always the same."""
        return dict(self._book) if role == self._role else {}

    def watch(self, role: str, changed: Callable[[Mapping[int, str]], None]) -> None:
        """Call once: nothing changes."""
        changed(self.query(role))

    def close(self) -> None:
        """Nothing is held."""


class TfConfig:
    """What the variable TF_CONFIG says of a job: its cluster, and which task this process is.

    Workers are the chief, if there is one, and then those called so.

    Args:
        text: the variable's value, JSON.

    Attributes:
        role: of this process: "ps" or "worker".
        index: in its role.
        address: HOST:PORT of this process.

    Raises:
        ConfigError: the variable is unset or malformed, or its task is not in its cluster.
    """

    def __init__(self, text: str) -> None:
        try:
            settings = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _bad(f"{text[:100]!r} ({error})") from None
        cluster, task = _mapping(settings, "cluster"), _mapping(settings, "task")
        self._books = {
            "ps": dict(enumerate(_hosts(cluster, "ps"))),
            "worker": dict(enumerate([*_hosts(cluster, "chief"), *_hosts(cluster, "worker")])),
        }
        kind = task.get("type")
        if kind not in ("chief", "worker", "ps") or len(_hosts(cluster, "chief")) > 1:
            raise _bad(f"task type {kind!r} and chiefs {cluster.get('chief', [])!r}")
        self.role = "worker" if kind == "chief" else kind
        self.index = check_index(task.get("index"))
        if self.index >= len(_hosts(cluster, kind)):
            raise _bad(f"task {kind} {self.index} of {len(_hosts(cluster, kind))}")
        self.index += len(_hosts(cluster, "chief")) if kind == "worker" else 0
        self.address = self._books[self.role][self.index]

    def register(self, role: str, index: int, address: str, *, replace: bool = True) -> bool:
        """Whoever is in the cluster is registered."""
        return read_only("TF_CONFIG", role, index, address, self.query(role))

    def query(self, role: str) -> dict[int, str]:
        """Who is there: always the same.

        Raises:
            ConfigError: another role than ps and worker.
        """
        if role not in self._books:
            raise ConfigError(
                "role in TF_CONFIG",
                got=repr(role)[:200],
                allowed="ps, worker",
                remedy="A chief is worker 0.",
            )
        return dict(self._books[role])

    def watch(self, role: str, changed: Callable[[Mapping[int, str]], None]) -> None:
        """Call once: nothing changes."""
        changed(self.query(role))

    def close(self) -> None:
        """Nothing is held."""


def _mapping(settings: Any, key: str) -> dict[str, Any]:
    found = settings.get(key) if isinstance(settings, dict) else None
    if not isinstance(found, dict):
        raise _bad(f"{key} {found!r}")
    return found


def _hosts(cluster: Mapping[str, Any], role: str) -> list[str]:
    found = cluster.get(role, [])
    if not isinstance(found, list):
        raise _bad(f"{role} {found!r}")
    return _checked(found, f"address of a {role} in TF_CONFIG")


def _checked(addresses: Sequence[Any], what: str) -> list[str]:
    checked = [check_address(one, what) for one in addresses]
    twice = sorted({one for one in checked if checked.count(one) > 1})
    if twice:
        raise ConfigError(
            what, got=f"{twice} more than once", allowed="another for each", remedy="Correct it."
        )
    return checked


def _bad(got: str) -> ConfigError:
    return ConfigError(
        "variable TF_CONFIG",
        got=got[:300],
        allowed='JSON: {"cluster": {"ps": ["HOST:PORT"], "worker": [...], "chief": [...]}, '
        '"task": {"type": "worker", "index": 0}}',
        remedy="Set it as TensorFlow's launchers do.",
    )

"""Roles, indices and addresses, checked before anything is done with them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.comm.launch_environment import PORTS
from shoal.errors import ConfigError

MOST_INDEX = 1 << 20
_ROLE = re.compile(r"[-_0-9A-Za-z]{1,100}")
_ADDRESS = re.compile(r"(?:[0-9A-Za-z_.-]{1,255}|\[[0-9A-Fa-f:.%a-z]{2,60}\]):([0-9]{1,5})")


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT, with IPv6 in brackets."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[1]) < PORTS


def check_address(text: object, what: str = "address of a process") -> str:
    """HOST:PORT; "tcp://" in front is taken off.

    Raises:
        ConfigError: it is no address.
    """
    bare = text.removeprefix("tcp://") if isinstance(text, str) else ""
    if not is_address(bare):
        raise ConfigError(
            what,
            got=repr(text)[:200],
            allowed=f"HOST:PORT with a port of 1..{PORTS - 1}, IPv6 in brackets",
            remedy="Give the address that others reach it at.",
        )
    return bare


def check_role(role: object) -> str:
    """The name of a role.

    Raises:
        ConfigError: other characters, or too many.
    """
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ConfigError(
            "role of a process",
            got=repr(role)[:200],
            allowed="1 to 100 letters, digits, - and _",
            remedy="Use ps or worker.",
        )
    return role


def check_index(index: object) -> int:
    """The index of a process in its role.

    Raises:
        ConfigError: no such index.
    """
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < MOST_INDEX:
        raise ConfigError(
            "index of a process",
            got=repr(index)[:200],
            allowed=f"0..{MOST_INDEX - 1}",
            remedy="Number the processes of a role from 0.",
        )
    return index


def read_only(what: str, role: str, index: int, address: str, book: Mapping[int, str]) -> bool:
    """Registration where addresses are given: who is in the list is registered already.

    Raises:
        ConfigError: the list has another address there, or none.
    """
    check_role(role)
    given = book.get(check_index(index))
    if given is None or (address and check_address(address) != given):
        raise ConfigError(
            f"registration of {role} {index} in {what}",
            got=repr(address),
            allowed=f"the addresses that it lists: {dict(book)}",
            remedy="Correct the list, or use a discovery that processes can write to: zookeeper.",
        )
    return True

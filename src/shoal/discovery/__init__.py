"""Who is where: processes of a job register their addresses, and others find them."""

from __future__ import annotations

from shoal.discovery.address_book import Book, Discovery, open_discovery, wait_for
from shoal.discovery.fixed import StaticList, TfConfig
from shoal.discovery.memory import Memory, Space
from shoal.discovery.zookeeper import ZooKeeper

__all__ = [
    "Book",
    "Discovery",
    "Memory",
    "Space",
    "StaticList",
    "TfConfig",
    "ZooKeeper",
    "open_discovery",
    "wait_for",
]

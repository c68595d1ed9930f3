"""From a batch's ids to pooled rows and back: in one process, or between ranks."""

from __future__ import annotations

from shoal.exchange.all_to_all import AllToAllExchange, GradReduce
from shoal.exchange.local import LocalExchange
from shoal.exchange.request import Exchange, PendingRecords, Request, Route, Sending
from shoal.exchange.wire import Wire

__all__ = [
    "AllToAllExchange",
    "Exchange",
    "GradReduce",
    "LocalExchange",
    "PendingRecords",
    "Request",
    "Route",
    "Sending",
    "Wire",
]

"""Messages between clients and a server that are not ours: what leaves a client, what the server keeps, what comes out."""

from __future__ import annotations

from jaxlsgd.federation.agreement import Agreement, agree
from jaxlsgd.federation.client import (
    FinalMessage,
    RoundMessage,
    final_message,
    flatten,
    numbers_leaving,
    round_message,
    what_leaves,
)
from jaxlsgd.federation.final import FederationFit, finish
from jaxlsgd.federation.server import (
    Broadcast,
    ServerState,
    begin,
    broadcast,
    estimate,
    receive,
)

__all__ = [
    "Agreement",
    "Broadcast",
    "FederationFit",
    "FinalMessage",
    "RoundMessage",
    "ServerState",
    "agree",
    "begin",
    "broadcast",
    "estimate",
    "final_message",
    "finish",
    "flatten",
    "numbers_leaving",
    "receive",
    "round_message",
    "what_leaves",
]

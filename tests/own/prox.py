"""An algorithm of somebody's own: FedProx."""

import functools

import jaxlsgd


@jaxlsgd.register("algorithm")
@functools.cache
def prox(mu: float) -> jaxlsgd.Algorithm:
    """FedProx."""

    def direction(gradient, client, round):
        return gradient + mu * (client.x - round.params), client.local

    return jaxlsgd.Algorithm("prox", direction=direction)

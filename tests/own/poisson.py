"""A problem of somebody's own: Poisson regression.

Client k observes a ~ N(0, I) and y ~ Poisson(exp(aᵀθ_k)), with the loss exp(aᵀx) − y aᵀx. As
E a exp(aᵀx) = x exp(|x|²/2), the optimum solves x exp(|x|²/2) = Σ_k p_k θ_k exp(|θ_k|²/2), which is an
equation for the length of x alone.
"""

import jax.numpy as jnp
import numpy as np
import scipy.optimize

import jaxlsgd

MOST = 12  # events that are told apart


@jaxlsgd.register("problem")
def poisson(num_clients: int, scale: float = 0.3, seed: int = 0) -> jaxlsgd.Problem:
    """Poisson regression with two covariates."""
    thetas = scale * np.random.default_rng(seed).normal(size=(num_clients, 2))
    weighed = thetas * np.exp((thetas**2).sum(1, keepdims=True) / 2)
    target = weighed.mean(0)
    norm = np.linalg.norm(target)
    length = scipy.optimize.brentq(lambda r: r * np.exp(r * r / 2) - norm, 0, norm)
    return jaxlsgd.Problem(
        init=np.zeros(2),
        loss=loss,
        draws=jaxlsgd.Draws(normal=2, uniform=1),
        observe=observe,
        num_clients=num_clients,
        clients=thetas.astype(np.float32),
        truth=target / norm * length,
        name="poisson",
        gamma0=0.3,
    )


def loss(x, observation):
    a, y = observation
    return jnp.exp(a @ x) - y * (a @ x)  # the loss


def observe(draws, theta):
    """Counts by inversion of their distribution function."""
    rate = jnp.exp(draws.normal @ theta)
    ratios = jnp.concatenate([jnp.ones(1), rate / jnp.arange(1, MOST)])
    below = jnp.cumsum(jnp.exp(-rate) * jnp.cumprod(ratios))
    return draws.normal, jnp.sum(draws.uniform[0] > below).astype(rate.dtype)

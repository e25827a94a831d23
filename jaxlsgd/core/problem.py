"""The contract of a problem: a loss, a source of observations, and what is known of the truth.

Problems are written for one client and one replication; only the engine adds those dimensions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxlsgd.core import checks, tracing
from jaxlsgd.core.checks import blaming, refusal
from jaxlsgd.core.display import Table, Tabular, facts
from jaxlsgd.core.forms import OuterProduct, Scaled, dense
from jaxlsgd.core.tracing import linear_form

Array = jax.Array
# Pytrees of arrays. A narrower type would refuse a user's function that is typed for its own pytree.
Params = Any
Observation = Any
ClientNumbers = Any


class Draws(NamedTuple):
    """The standard draws that one observation is made of; in a declaration, how many of each it needs."""

    normal: Any = 0  # (normals,) float, or the count
    uniform: Any = 0  # (uniforms,) float in (0, 1), or the count


class Moment(NamedTuple):
    """A client at the time of an observation, in a problem that drifts."""

    client: Any
    t: Any  # () uint32, the number of the observation, from 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Problem(Tabular):
    """A federated estimation problem: minimise Σ_k p_k E f(x; ξ_k) over x.

    Observations come from one of two sources: `sample(key, client)`, which is easier to write, or
    `draws` and `observe(draws, client)`, which is faster, because the engine makes the standard
    draws of a whole block at once. `client` is the client's index, or its slice of `clients`.

    Example::

        import jax, jax.numpy as jnp, jaxlsgd

        def sample(key, client):
            a = jax.random.normal(key, (3,))
            return a, a @ jnp.ones(3) + 0.1 * client

        problem = jaxlsgd.Problem(
            init=jnp.zeros(3), sample=sample, num_clients=4,
            loss=lambda params, obs: 0.5 * (obs[0] @ params - obs[1]) ** 2,
        )

    Args:
      init: starting parameters x_0, any pytree of floating arrays.
      loss: `(params, observation) → scalar`.
      num_clients: K.
      sample: `(key, client) → observation`.
      draws: how many standard normals and uniforms an observation needs.
      observe: `(draws, client) → observation`.
      weights: p_k, (K,), non-negative with sum 1; uniform if None.
      truth: x*, a pytree like `init` or one vector, if it is known.
      truth_covariance: covariance of the error of `truth`, (d, d), if `truth` was estimated, as by
        `problems.solve`; None if it is exact. If only standard errors are known, `np.diag(errors**2)`.
      clients: pytree with leading dimension K of what differs between clients.
      gradient: `(params, observation) → pytree like params`, or a `Scaled` vector; `jax.grad(loss)` if None.
      hessian: `(params, observation) → (d, d)`, or an `OuterProduct`; `jax.hessian(loss)` if None.
      G: ∇²f(x*), (d, d), if it is known.
      S: covariance of the averaged gradient at x*, (d, d), if it is known.
      name: short name for tables; studies need one.
      gamma0: γ_0 of an effective step γ_m = γ_0 m^(−α) that suits the problem, for studies that give none.
      about: what intervals are about, if not the population of the observations; printed with them.
      drifts: whether observations depend on time; `sample` and `observe` are then called with a `Moment`
        instead of the client, as in `problems.drifting`.
      copies: how many copies of one model the parameters hold, for methods that need several runs in one.
      convex: whether the loss is known to be convex in the parameters. Unless it is, a printed fit says that its
        intervals are about the minimum near the estimate.
    """

    init: Params
    loss: Callable[[Params, Observation], Array]
    num_clients: int
    sample: Callable[[Array, ClientNumbers], Observation] | None = None
    draws: Draws | None = None
    observe: Callable[[Draws, ClientNumbers], Observation] | None = None
    weights: Any = None
    truth: Params | None = None
    clients: Any = None
    gradient: Callable[[Params, Observation], Params | Scaled] | None = None
    hessian: Callable[[Params, Observation], Array | OuterProduct] | None = None
    G: Any = None
    S: Any = None
    name: str = ""
    gamma0: float | None = None
    about: str = ""
    drifts: bool = False
    copies: int = 1
    truth_covariance: Any = None
    convex: bool = False

    def __post_init__(self) -> None:
        checks.count("num_clients", self.num_clients, 1)
        put = functools.partial(object.__setattr__, self)
        put("weights", checks.weights(self.weights, self.num_clients))
        check_finite("init", self.init)
        put("init", jax.tree.map(_as_float, self.init))
        if self.dim == 0:
            raise refusal("init", "have at least one parameter", "none", code="shape")
        if self.truth is not None:
            check_finite("truth", self.truth)
            _check_parameters("truth", "be", self.init, _listed(self.truth, self.init))
        _check_truth_covariance(self.truth_covariance, self.truth)
        if self.truth_covariance is not None and not np.any(self.truth_covariance):
            put("truth_covariance", None)
        for name in ("G", "S", "truth_covariance"):
            matrix = getattr(self, name)
            if matrix is not None:
                _check_shape(name, "have", (self.dim, self.dim), np.asarray(matrix))
            check_finite(name, matrix)
        if self.clients is None:
            put("clients", np.arange(self.num_clients, dtype=np.int32))
        _check_clients(self.clients, self.num_clients)
        if self.name:
            checks.label("name", self.name)
        if self.gamma0 is not None:
            checks.positive("gamma0", self.gamma0)
        _check_source(self)
        _check_loss(self)

    @property
    def dim(self) -> int:
        """Return d, the number of parameters."""
        return _flat_size(self.init)

    @property
    def true_vector(self) -> np.ndarray | None:
        """Return x* as a flat float64 vector, or None."""
        if self.truth is None:
            return None
        leaves = jax.tree.leaves(self.truth)
        return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in leaves])

    @property
    def truth_error(self) -> np.ndarray | None:
        """Return the standard errors of `true_vector`, (d,); None if the truth is exact or not known."""
        if self.truth_covariance is None:
            return None
        return np.sqrt(np.diagonal(np.asarray(self.truth_covariance, np.float64)))

    def parameter_names(self) -> list[str]:
        """Return one name per coordinate of the flattened parameters: `x[0]`, or the pytree's path."""
        names = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.init):
            stem = jax.tree_util.keystr(path) or "x"
            shape = np.shape(leaf)
            names += [stem + (f"[{','.join(map(str, i))}]" if i else "") for i in np.ndindex(shape)]
        return names

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"Problem({name}dim={self.dim}, num_clients={self.num_clients})"

    def table(self) -> Table:
        """Return what the problem is, as a table; `print(problem)` and a notebook show it."""
        names, p, errors = self.parameter_names(), self.weights, self.truth_error
        equal = np.allclose(p, p[0])
        truth = self.true_vector
        known = "not known"
        if truth is not None:
            known = ", ".join(f"{x:.4g}" for x in truth[:6]) + (", …" if len(truth) > 6 else "")
            known += "" if errors is None else f" (known to ±{errors.max():.2g})"
        draws = self.draws
        source = "sample(key, client)"
        if draws is not None:
            source = f"observe(draws, client) of {draws.normal} normals, {draws.uniform} uniforms"
        of = f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]
        lines = [
            ("parameters", f"{self.dim}: {of}"),
            ("clients", f"{self.num_clients:,}"),
            ("weights", "equal" if equal else f"{p.min():.3g} to {p.max():.3g}"),
            ("truth x*", known),
            (
                "G and S",
                " and ".join(x for x in "GS" if getattr(self, x) is not None) or "not known",
            ),
            ("observations", source + (", drifting" if self.drifts else "")),
            ("gradient", "of its own" if self.gradient else "by JAX"),
            ("Hessian", "of its own" if self.hessian else "by JAX"),
            ("γ_0 that suits", "" if self.gamma0 is None else f"{self.gamma0:.4g}"),
            ("intervals are", self.about),
        ]
        return facts("problem", self.name or "without a name", lines)

    def structure(self) -> Structure:
        """Return what the compiled program depends on besides array shapes: functions and counts."""
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self.init))
        functions = (self.loss, self.sample, self.observe, self.gradient, self.hessian)
        return Structure(functions, self.draws, jax.tree.structure(self.init), shapes, self.drifts)


class Structure(NamedTuple):
    """The hashable part of a problem; see `Problem.structure`."""

    functions: tuple[Callable[..., Any] | None, ...]
    draws: Draws | None
    treedef: Any
    shapes: tuple[Any, ...]
    drifts: bool = False

    def flat_functions(self) -> FlatFunctions:
        """Return the problem's functions on flat parameter vectors."""
        loss, sample, observe, gradient, hessian = self.functions
        like = self.treedef.unflatten([np.zeros(shape) for shape, _ in self.shapes])

        def shaped(vector: Array) -> Params:
            return unravel(vector, like)

        def flat_loss(vector: Array, observation: Observation) -> Array:
            assert loss is not None
            with blaming(loss, "`loss`"):
                return loss(shaped(vector), observation)

        fast_loss = tracing.replaced(flat_loss, tracing.PRODUCTS)

        def flat_gradient(vector: Array, observation: Observation) -> Array | Scaled:
            if gradient is None:
                form = linear_form(flat_loss, vector, observation)
                return (form.gradient if form else jax.grad(fast_loss))(vector, observation)
            with blaming(gradient, "`gradient`"):
                found = gradient(shaped(vector), observation)
            return found if isinstance(found, Scaled) else flatten(found)

        def flat_hessian(vector: Array, observation: Observation) -> Array | OuterProduct:
            if hessian is None:
                form = linear_form(flat_loss, vector, observation)
                return (form.hessian if form else jax.hessian(fast_loss))(vector, observation)
            with blaming(hessian, "`hessian`"):
                return hessian(shaped(vector), observation)

        return FlatFunctions(
            flat_gradient if gradient is not None else tracing.Derived(flat_gradient),
            flat_hessian if hessian is not None else tracing.Derived(flat_hessian),
            sample,
            observe,
            shaped,
            flat_loss,
        )


class FlatFunctions(NamedTuple):
    """A problem's functions for one client and one replication, on flat vectors (d,)."""

    gradient: Callable[[Array, Observation], Array | Scaled]
    hessian: Callable[[Array, Observation], Array | OuterProduct]
    sample: Callable[[Array, ClientNumbers], Observation] | None
    observe: Callable[[Draws, ClientNumbers], Observation] | None
    unravel: Callable[[Array], Params]
    loss: Callable[[Array, Observation], Array]


def flatten(params: Params) -> Array:
    """Return a pytree of parameters as one vector."""
    if isinstance(params, (jax.Array, np.ndarray)) and np.ndim(params) == 1:
        return jnp.asarray(params)
    return ravel_pytree(params)[0]


def unravel(vector: Any, like: Params) -> Params:
    """Return a vector, (d,), in the shapes of the pytree `like`, in the vector's own precision.

    A NumPy vector gives NumPy arrays. Unlike `ravel_pytree`, this needs no arrays in `like`, only shapes.
    """
    leaves, treedef = jax.tree.flatten(like)
    shapes = [np.shape(leaf) for leaf in leaves]
    # A reshape of a plain vector would spoil the memory layout of the engine's innermost loop.
    if jax.tree_util.treedef_is_leaf(treedef) and len(shapes[0]) == 1:
        return vector
    split = np.split if isinstance(vector, np.ndarray) else jnp.split
    parts = split(vector, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return treedef.unflatten([part.reshape(x) for part, x in zip(parts, shapes, strict=True)])


def check_finite(name: str, tree: Any) -> None:
    """Refuse a pytree with a NaN or an infinity, and name the place of the first one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        checks.finite(name + jax.tree_util.keystr(path), leaf)


def _as_float(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf if np.issubdtype(leaf.dtype, np.floating) else leaf.astype(np.float32)


def _flat_size(tree: Params) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def _refused(argument: str, rule: str, got: Any) -> Iterator[None]:
    """Refuse a pytree, with its shapes, if chex finds it wrong."""
    try:
        yield
    except AssertionError as error:
        raise refusal(argument, rule, jax.tree.map(np.shape, got), code="shape") from error


def _abstract(tree: Any) -> Any:
    """Return the pytree with shapes in place of its arrays and numbers."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jnp.float32), tree)


def _check_shape(argument: str, verb: str, shape: tuple[int, ...], found: Any) -> None:
    """Refuse what is not one array of this shape."""
    rule = f"{verb} shape {shape}" if shape else f"{verb} a scalar"
    with _refused(argument, rule, found):
        # Not `assert_shape`, which accepts a pair of scalars as two right shapes.
        one = jax.ShapeDtypeStruct(shape, jnp.float32)
        chex.assert_trees_all_equal_shapes(one, _abstract(found))


def _check_parameters(argument: str, verb: str, init: Params, found: Any) -> None:
    """Refuse what is neither a pytree like the parameters nor one vector of all of them.

    It is not enough to count them: under other names they may come in another order.
    """
    dim = _flat_size(init)
    if getattr(found, "shape", None) == (dim,):
        return
    rule = f"{verb} a pytree like init, or one vector of all {dim} parameters"
    with _refused(argument, rule, found):
        chex.assert_trees_all_equal_shapes(_abstract(init), _abstract(found))


def _listed(value: Any, init: Params) -> Any:
    """Return a list of numbers as an array, unless the parameters are such a list themselves."""
    alike = jax.tree.structure(value) == jax.tree.structure(init)
    if alike or not isinstance(value, (list, tuple)):
        return value
    with contextlib.suppress(ValueError, TypeError):  # lists of several lengths, or of pytrees
        return np.asarray(value, np.float64)
    return value


def _check_truth_covariance(covariance: Any, truth: Any) -> None:
    if covariance is None:
        return
    if truth is None:
        raise refusal("truth_covariance", "be None if truth is None", "a matrix", code="unwanted")
    least = np.min(np.diagonal(covariance), initial=0.0) if np.ndim(covariance) == 2 else 0.0
    if least < 0:
        raise refusal("truth_covariance", "have no negative variance", least)


def _check_clients(clients: Any, num_clients: int) -> None:
    rule = f"have leading dimension num_clients = {num_clients} in every leaf"
    with _refused("clients", rule, clients):
        chex.assert_tree_shape_prefix(_abstract(clients), (num_clients,))
    check_finite("clients", clients)


def _check_source(problem: Problem) -> None:
    """Refuse a problem whose observations have no source, two sources, or shapes that vary."""
    easy, fast = problem.sample is not None, problem.observe is not None
    if easy == fast:
        text = (
            f"sample: give either sample or draws with observe, got {'both' if easy else 'neither'}"
        )
        raise checks.Refusal(text, "sample", "conflict" if easy else "missing")
    if fast and not isinstance(problem.draws, Draws):
        raise refusal("draws", "be declared as Draws(...) for observe", problem.draws, code="type")
    if fast:
        checks.count("draws.normal", problem.draws.normal, 0)  # type: ignore[union-attr]
        checks.count("draws.uniform", problem.draws.uniform, 0)  # type: ignore[union-attr]
    last = problem.num_clients - 1
    first = _observation_shape(problem, 0)
    for k in sorted({last // 2, last} - {0}):
        found = _observation_shape(problem, k)
        try:
            chex.assert_trees_all_equal_shapes_and_dtypes(first, found)
        except AssertionError as error:
            got = [
                jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree) for tree in (first, found)
            ]
            argument = "sample" if easy else "observe"
            text = (
                f"{argument}: must make observations of the same shape for every client, "
                f"got {got[0]} for client 0 and {got[1]} for client {k}"
            )
            raise checks.Refusal(text, argument, "shape") from error


def abstract_source(problem: Problem) -> tuple[Callable[..., Any], Any]:
    """Return the source of observations and the abstract value of its first argument."""
    if problem.sample is not None:
        source, argument = problem.sample, jax.eval_shape(lambda: jax.random.key(0))
    else:
        assert problem.observe is not None and problem.draws is not None
        shapes = [jax.ShapeDtypeStruct((count,), jnp.float32) for count in problem.draws]
        source, argument = problem.observe, Draws(*shapes)
    return at_time(source, problem.drifts, np.uint32(0)), argument


def at_time(source: Callable[..., Any], drifts: bool, t: Any) -> Callable[..., Any]:
    """Return `sample` or `observe` at observation t, as a function of a client instead of a `Moment`."""
    return (lambda given, client: source(given, Moment(client, t))) if drifts else source


def _observation_shape(problem: Problem, k: int) -> Any:
    source, argument = abstract_source(problem)
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[k]), problem.clients)
    with _blaming(problem, "sample" if problem.sample is not None else "observe"):
        return _source_shape(lambda a: source(a, client), argument)


def _source_shape(source: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return jax.eval_shape(source, *arguments)
    except TypeError as error:
        # JAX raises a plain TypeError for a traced number as a shape.
        if not isinstance(error, jax.errors.JAXTypeError) and "concrete" not in str(error):
            raise
        text = (
            "sample: must work for a traced client, so that all clients run at once; "
            f"its shapes or branches may not depend on the client's value ({type(error).__name__})"
        )
        raise checks.Refusal(text, "sample") from error


def _check_loss(problem: Problem) -> None:
    """Refuse a loss, gradient or Hessian whose result has the wrong shape."""
    source, argument = abstract_source(problem)
    client = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], problem.clients))
    with _blaming(problem, "sample" if problem.sample is not None else "observe"):
        observation = _source_shape(source, argument, client)
    with _blaming(problem, "loss"):
        found = jax.eval_shape(problem.loss, problem.init, observation)
    _check_shape("loss", "return", (), found)
    if problem.hessian is not None:
        with _blaming(problem, "hessian"):
            found = _shape_at(problem.hessian, problem, observation)
        _check_shape("hessian", "return", (problem.dim, problem.dim), found)
    if problem.gradient is not None:
        with _blaming(problem, "gradient"):
            found = _shape_at(problem.gradient, problem, observation)
        _check_parameters("gradient", "return", problem.init, found)


def _blaming(problem: Problem, part: str) -> contextlib.AbstractContextManager[None]:
    whose = f"problem {problem.name!r}" if problem.name else "the problem"
    return blaming(getattr(problem, part), f"`{part}` of {whose}")


def _shape_at(function: Callable[[Any, Any], Any], problem: Problem, observation: Any) -> Any:
    return jax.eval_shape(lambda *at: dense(function(*at)), problem.init, observation)


def has_curvature(problem: Problem) -> bool:
    """Return whether the Hessian of the loss differs from 0 at some parameters and observation.

    It is 0 everywhere for absolute and quantile losses, whose kinks have no derivative. The test is whether
    JAX's program for the Hessian returns zeros that depend on no argument. Huber's loss, which is curved
    somewhere, passes.
    """
    source, argument = abstract_source(problem)
    client = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], problem.clients))
    leaves, treedef = jax.tree.flatten(jax.eval_shape(source, argument, client))
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return _has_curvature(problem.structure(), problem.dim, treedef, shapes)


@functools.lru_cache(maxsize=256)
def _has_curvature(structure: Structure, dim: int, treedef: Any, shapes: Any) -> bool:
    hessian = structure.flat_functions().hessian

    def curvature(x: Any, seen: Any) -> Any:
        found = hessian(x, seen)
        if isinstance(found, OuterProduct):
            return jnp.ones(()) if found.weight is None else found.weight
        return dense(found)

    abstract: Any = jax.ShapeDtypeStruct
    seen = treedef.unflatten([abstract(*shape) for shape in shapes])
    return not tracing.is_zero(curvature, abstract((dim,), jnp.float32), seen)

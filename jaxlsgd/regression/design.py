"""Which columns of a table are read, and rows as numbers: by pandas, or by Arrow alone for files of numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxlsgd.core import checks
from jaxlsgd.core.checks import refusal
from jaxlsgd.core.display import plural
from jaxlsgd.regression import formulas

FloatArray = NDArray[np.floating[Any]]
INTERCEPT = "Intercept"
_NEAR = 1024  # whole numbers within that range are codes already
_DECIMAL_COMMA = re.compile(r"[-+]?\d*(,\d+)?")
# Text that is a gap, without the spaces around it and in small letters: what Excel, R, pandas and C write for one.
_GAPS = ("", "na", "n/a", "nan", "-nan", "null", "#n/a", "#na", "#n/a n/a", "<na>")
_GAPS += ("1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan")
# The same for Arrow's parser, which reads numbers and knows no rule; `files` asks `gaps_of` for other spaces around them.
_SPELT = {made(one) for one in (*_GAPS, "NaN", "-NaN") for made in (str, str.upper, str.title)}
_PADS = [
    (" " * left, " " * right) for left in range(9) for right in range(9) if min(left, right) < 2
]
CSV_GAPS = sorted({left + one + right for one in _SPELT for left, right in _PADS})
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?($|[T ])|\d\d?[./]\d\d?[./]\d{4}($| )")


@dataclasses.dataclass(frozen=True)
class Model:
    """Which columns explain which; see `fit_table` for the meaning of the fields."""

    response: str | None
    client: str | None
    features: Sequence[str] | None
    formula: str | None
    intercept: bool
    missing: str
    row_weights: str | None = None
    offset: str | None = None
    exposure: str | None = None


class Block(NamedTuple):
    """Some rows of a table as numbers; the first column of `X` is the intercept's, if there is one."""

    X: FloatArray  # (n, d)
    y: FloatArray  # (n,)
    client: NDArray[Any]  # (n,) labels
    dropped: int  # rows left out, as something was missing
    weight: FloatArray | None = None  # (n,) of the rows
    offset: FloatArray | None = None  # (n,) of the linear predictor


@dataclasses.dataclass(frozen=True)
class Design:
    """What is read of a table: made from its first rows, and used for all."""

    response: str
    client: str | None  # None if one client has all rows
    names: tuple[str, ...]  # of the coefficients
    columns: tuple[str, ...]  # that are read
    missing: str
    spec: Any = None  # of a formula
    intercept: bool = True
    row_weights: str | None = None
    offset: str | None = None
    exposure: str | None = None

    def read(self, frame: Any, first_row: int = 0) -> Block:
        """Return rows as numbers; refuse what is missing, infinite or not a number.

        Args:
          frame: a pandas table with the columns of this design.
          first_row: how many rows came before, for messages.
        """
        frame, dropped = _complete(frame[list(self.columns)], self.missing, first_row)
        client = np.zeros(len(frame), np.int8) if self.client is None else frame[self.client]
        if self.spec is None:
            y = _numbers(frame[self.response], f"response {self.response!r}")
            parts = [
                _numbers(frame[name], f"column {name!r}")
                for name in self.names
                if name != INTERCEPT or not self.intercept
            ]
            ones = [np.ones(len(y))] if self.intercept else []
            X = np.stack([*ones, *parts], axis=1) if len(y) else np.zeros((0, len(self.names)))
        else:
            y, X = _evaluated(self.spec, frame)
        more = (self.weight_of(frame), self.offset_of(frame))
        return Block(X, _finite(self, X, y), np.asarray(client), dropped, *more)

    def features(self, frame: Any) -> FloatArray:
        """Return the columns of new rows, which need no response; NaN in rows in which something is missing."""
        if self.spec is not None:
            needed = sorted(map(str, self.spec.rhs.required_variables))
            for name in needed:
                _known(frame, "rows", name)
            whole = ~frame[needed].isna().any(axis=1).to_numpy()
            X = np.full((len(frame), len(self.names)), np.nan)
            if whole.any():
                X[whole] = _right_side(self.spec, frame[whole])
            return X
        names = [name for name in self.names if name != INTERCEPT or not self.intercept]
        for name in names:
            _known(frame, "rows", name)
        ones = [np.ones(len(frame))] if self.intercept else []
        parts = [_numbers(frame[name], f"column {name!r}") for name in names]
        return np.stack([*ones, *parts], axis=1)

    def weight_of(self, frame: Any) -> FloatArray | None:
        """Return the weights of rows; refuse those below 0."""
        if self.row_weights is None:
            return None
        column = frame[self.row_weights]
        return self.checked_weight(_numbers(column, f"row_weights {self.row_weights!r}"))

    def offset_of(self, frame: Any) -> FloatArray | None:
        """Return what is added to the linear predictor of rows: the offset and the log of the exposure."""
        offset = exposure = None
        if self.offset is not None:
            offset = _numbers(frame[self.offset], f"offset {self.offset!r}")
        if self.exposure is not None:
            exposure = _numbers(frame[self.exposure], f"exposure {self.exposure!r}")
        return self.checked_offset(offset, exposure)

    def checked_weight(self, values: Any) -> FloatArray:
        """Refuse weights below 0 or without an end."""
        bad = ~((values >= 0) & (values < np.inf))
        if bad.any():
            rule = "be finite and at least 0"
            raise refusal(f"row_weights {self.row_weights!r}", rule, float(values[bad][0]))
        return np.asarray(values, np.float64)

    def checked_offset(self, offset: Any, exposure: Any) -> FloatArray | None:
        """Return offset plus log exposure; None if there is neither."""
        if exposure is not None:
            bad = ~((exposure > 0) & (exposure < np.inf))
            if bad.any():
                rule = "be finite and greater than 0"
                raise refusal(f"exposure {self.exposure!r}", rule, float(exposure[bad][0]))
        if offset is not None and not np.isfinite(offset).all():
            rule = "be finite in every row"
            raise refusal(
                f"offset {self.offset!r}",
                rule,
                float(offset[~np.isfinite(offset)][0]),
                code="not_finite",
            )
        if exposure is None:
            return None if offset is None else np.asarray(offset, np.float64)
        logged = np.log(np.asarray(exposure, np.float64))
        return logged if offset is None else logged + offset


def as_frame(table: Any) -> Any:
    """Return a pandas table of whatever has columns (pandas, polars, pyarrow, a mapping of arrays), its gaps found."""
    pandas = extra("pandas")
    if hasattr(table, "collect") and not hasattr(table, "to_pandas"):
        table = table.collect()  # a polars LazyFrame
    if isinstance(table, pandas.DataFrame):
        table = table.rename(columns=str)
    elif hasattr(table, "to_pandas"):
        table = table.to_pandas()
    elif hasattr(table, "__arrow_c_stream__"):
        table = extra("pyarrow").table(table).to_pandas()
    elif isinstance(table, Mapping):
        table = pandas.DataFrame({name: np.asarray(column) for name, column in table.items()})
    else:
        rule = "be a table with named columns, such as a pandas DataFrame"
        raise refusal("frame", rule, table, code="type")
    return _with_gaps(table)


def is_gap(text: Any) -> bool:
    """Return whether a text stands for a value that is missing: the rule of all kinds of tables and files."""
    return isinstance(text, str) and text.strip().casefold() in _GAPS


def gaps_of(column: Any) -> list[str]:
    """Return the texts of an Arrow column that stand for a missing value but are not among `CSV_GAPS`."""
    arrow, compute = extra("pyarrow"), extra("pyarrow.compute")
    levels = column.unique()
    bare = compute.utf8_lower(compute.utf8_trim_whitespace(levels))
    found = levels.filter(compute.is_in(bare, value_set=arrow.array(_GAPS, bare.type)))
    return sorted({*found.to_pylist()}.difference(CSV_GAPS))


def _with_gaps(frame: Any) -> Any:
    """Return a pandas table in which text that stands for a missing value is missing."""
    changed = frame
    for i, kind in enumerate(frame.dtypes):
        if kind.kind not in "OU":
            continue
        column = frame.iloc[:, i]
        try:
            gaps = [one for one in column.dropna().unique() if is_gap(one)]
        except TypeError:  # lists, which are refused if they are used
            continue
        if gaps:
            changed = frame.copy(deep=False) if changed is frame else changed
            by_level = column.dtype == "category"
            changed.isetitem(
                i,
                column.cat.remove_categories(gaps) if by_level else column.mask(column.isin(gaps)),
            )
    return changed


def extra(module: str) -> Any:
    """Import a package that only tables need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"tables need {name}: pip install 'jaxlsgd[data]'") from error


def design(frame: Any, model: Model) -> Design:
    """Return what to read, from the first rows of a table, given as pandas' table."""
    response, client, features = model.response, model.client, model.features
    if not len(frame.columns) or not len(frame):
        what = f"{len(frame)} rows of {plural(len(frame.columns), 'column')}"
        raise refusal("frame", "have rows and columns", what, code="data")
    if len(set(frame.columns)) < len(frame.columns):
        twice = [name for name in frame.columns if list(frame.columns).count(name) > 1]
        raise refusal("frame", "have columns with names of their own", twice[0], code="duplicate")
    if client is not None:
        _levels(frame[_known(frame, "client", client)])
    if model.formula is not None:
        if features is not None:
            raise refusal("features", "be left out with a formula", features, code="unwanted")
        return _from_formula(frame, response, client, model)
    response = _known(frame, "response", response)
    if response == client:
        raise refusal("response", "be another column than client", response, code="conflict")
    others = _others(frame, model, response)
    chosen = [name for name in frame.columns if name not in (response, client, *others)]
    if features is not None:
        chosen = [_known(frame, "features", name) for name in features]
        checks.distinct("features", chosen)
        if response in chosen:
            raise refusal(
                "features",
                f"not have the response {response!r} among them",
                features,
                code="conflict",
            )
    if not chosen and not model.intercept:
        raise refusal("features", "have a column, or an intercept", chosen, code="missing")
    for name in chosen:
        _check_numeric(frame[name])
    names = ((INTERCEPT,) if model.intercept else ()) + tuple(str(name) for name in chosen)
    checks.distinct("features", names)
    columns = (response, *(() if client is None else (client,)), *chosen)
    columns += tuple(name for name in others if name not in columns)
    more = (model.row_weights, model.offset, model.exposure)
    return Design(response, client, names, columns, model.missing, None, model.intercept, *more)


def _others(frame: Any, model: Model, response: str) -> list[str]:
    """Return the columns that are weights, offset or exposure."""
    found = []
    for argument in ("row_weights", "offset", "exposure"):
        name = getattr(model, argument)
        if name is None:
            continue
        if _known(frame, argument, name) in (response, model.client):
            raise refusal(
                argument, "be another column than response and client", name, code="conflict"
            )
        _check_numeric(frame[name])
        found.append(name)
    return found


def _known(frame: Any, argument: str, name: Any) -> str:
    """Return a name that the table has; refuse another, and suggest the nearest."""
    known = [str(column) for column in frame.columns]
    if not isinstance(name, str) or name not in known:
        hint = checks.nearest(name, known) or f"; its columns: {checks.shown(', '.join(known))}"
        raise refusal(argument, "be a column of the table", name, hint, code="unknown")
    return name


def _check_numeric(column: Any) -> None:
    """Refuse text, and suggest what to do about it."""
    if column.dtype.kind in "fiub" or hasattr(column.dtype, "numpy_dtype"):
        return
    with contextlib.suppress(ValueError, TypeError):
        column.dropna().astype(np.float64)
        return
    levels = _levels(column)
    raise refusal(
        f"column {column.name!r}", "be numbers", *_not_numbers(column, levels), code="type"
    )


def _levels(column: Any) -> Any:
    """Return the values of a column, each once; refuse a column of lists."""
    try:
        return column.dropna().unique()
    except TypeError as error:
        rule, hint = "have one value per row", "; make each of its parts a column"
        what = f"a {type(column.dropna().iloc[0]).__name__} in each"
        raise refusal(f"column {column.name!r}", rule, what, hint, code="type") from error


def _not_numbers(column: Any, levels: Any) -> tuple[str, str]:
    """Return what a column has instead of numbers, and what to do about it."""
    name = column.name if str(column.name).isidentifier() else f"`{column.name}`"
    if _are_dates(column.dtype, levels):
        hint = (
            f"; count days, as in (frame[{column.name!r}] - frame[{column.name!r}].min()).dt.days"
        )
        return f"dates such as {str(levels[0])[:10]}", hint
    text = [str(level).strip() for level in levels[:1000]]
    if text and all(_DECIMAL_COMMA.fullmatch(one) for one in text):
        return _some(levels), "; if its commas are decimal, give decimal=','"
    hint = f"; as a factor it is C({name}) in a formula" if len(levels) <= 50 else ""
    return _some(levels), hint


def _are_dates(kind: Any, levels: Any) -> bool:
    if getattr(kind, "kind", "") in "Mm" or "date" in str(kind) or "timestamp" in str(kind):
        return True
    first = levels[0] if len(levels) else None
    return isinstance(first, datetime.date) or (
        isinstance(first, str) and all(_DATE.match(str(one).strip()) for one in levels[:100])
    )


def _numbers(column: Any, what: str) -> FloatArray:
    """Return a column as float64; text that spells numbers is read as such."""
    try:
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (ValueError, TypeError):
        pass
    try:
        return column.astype(str).str.strip().astype(np.float64).to_numpy()
    except (ValueError, TypeError) as error:
        levels = _levels(column)
        shown, hint = _not_numbers(column, levels)
        if len(levels) == 2:
            hint = f"; recode it, as in frame[{column.name!r}] == {max(map(str, levels))!r}"
        raise refusal(what, "be numbers", shown, hint, code="type") from error


def _some(levels: Any) -> str:
    shown = ", ".join(str(level) for level in levels[:3])
    return f"text such as {shown}" + (f" ({len(levels)} values)" if len(levels) > 3 else "")


def _complete(frame: Any, missing: str, first_row: int) -> tuple[Any, int]:
    """Return the rows in which nothing is missing, and how many others there are."""
    gaps = frame.isna()
    rows = gaps.any(axis=1).to_numpy()
    if not rows.any():
        return frame, 0
    if missing == "drop":
        return frame[~rows], int(rows.sum())
    counts = gaps.sum()
    found = ", ".join(f"{count:,} of {name!r}" for name, count in counts.items() if count)
    first = first_row + int(rows.argmax())
    hint = f", the first in row {first}; missing='drop' leaves such rows out"
    if any(counts[name] and frame[name].dtype.kind in "OU" for name in frame.columns):
        hint += ". Blank text, NA, NaN and NULL count as missing; rename a level that is called so"
    raise refusal("frame", "have no missing values", found, hint, code="data")


def _finite(design: Design, X: FloatArray, y: FloatArray) -> FloatArray:
    if np.isfinite(X).all() and np.isfinite(y).all():
        return y
    for name, values in ((design.response, y), *zip(design.names, X.T, strict=True)):
        bad = ~np.isfinite(values)
        if bad.any():
            raise refusal(
                f"column {name!r}",
                "be finite in every row",
                float(values[bad][0]),
                code="not_finite",
            )
    return y


def _from_formula(frame: Any, response: str | None, client: str | None, model: Model) -> Design:
    formulaic, formula, missing = extra("formulaic"), model.formula or "", model.missing
    with _formula_errors(formula):
        needed = formulas.columns_of(formula)  # before formulaic evaluates any of it
        formulas.check_size(formula)
        parsed = formulaic.Formula(formula)
    if not hasattr(parsed, "lhs"):
        hint = f"; did you mean '{response} ~ {formula}'?" if response else ""
        raise refusal("formula", "have a response, as in 'y ~ x'", formula, hint, code="missing")
    for name in needed:
        _levels(frame[_known(frame, "formula", name)])
    columns = (*needed, *([client] if client is not None and client not in needed else []))
    columns += tuple(one for one in _others(frame, model, "") if one not in columns)
    whole, _ = _complete(frame[list(columns)], missing, 0)
    with _formula_errors(formula):
        formulas.check_levels(parsed.rhs, whole)
    with _formula_errors(formula), warnings.catch_warnings():
        warnings.simplefilter("error")
        # With a context: by default, formulaic looks up names in the functions that call it.
        found = formulaic.model_matrix(parsed, whole, context=formulas.CONTEXT, na_action="ignore")
    spec = found.model_spec
    left = spec.lhs.column_names
    if len(left) != 1:
        rule = "have one column as its response; text is recoded beforehand"
        raise refusal("formula", rule, ", ".join(left))
    if response is not None and response != left[0]:
        raise refusal(
            "response",
            f"be that of the formula, {left[0]!r}, or be left out",
            response,
            code="conflict",
        )
    names = tuple(spec.rhs.column_names)
    if not names:
        rule = "have a column on its right, or an intercept"
        raise refusal("formula", rule, formula, code="missing")
    if left[0] in names:
        raise refusal(
            "formula", f"not have the response {left[0]!r} on its right", formula, code="conflict"
        )
    more = (model.row_weights, model.offset, model.exposure)
    return Design(left[0], client, names, columns, missing, spec, INTERCEPT in names, *more)


def _right_side(spec: Any, frame: Any) -> FloatArray:
    with _formula_errors("formula"), warnings.catch_warnings():
        warnings.simplefilter("error")  # a level that the fitted rows do not have
        return np.asarray(spec.rhs.get_model_matrix(frame, context=formulas.CONTEXT), np.float64)


def _evaluated(spec: Any, frame: Any) -> tuple[FloatArray, FloatArray]:
    with _formula_errors("formula"), warnings.catch_warnings():
        warnings.simplefilter("error")  # a level that the first rows do not have
        found = spec.get_model_matrix(frame, context=formulas.CONTEXT)
    y = np.asarray(found.lhs, np.float64)[:, 0]
    return y, np.asarray(found.rhs, np.float64)


@contextlib.contextmanager
def _formula_errors(formula: str) -> Iterator[None]:
    """Turn formulaic's errors, which are of many types, into one that names the argument."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if checks.argument_and_code(error)[0] == "formula":
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        text = f"formula: cannot be used, got {checks.shown(formula)} ({first})"
        raise checks.Refusal(text, "formula") from error


class Columns(NamedTuple):
    """Some rows of a file, without a copy if Arrow has numbers already."""

    features: Sequence[Any]  # d of them: (n,) numbers, or one number for all rows
    y: NDArray[Any]  # (n,)
    codes: NDArray[np.integer[Any]]  # (n,) place of each row's label
    labels: list[str]  # of clients; some may have no row
    dropped: int  # rows left out, as something was missing
    weight: NDArray[Any] | None = None  # (n,) of the rows
    offset: NDArray[Any] | None = None  # (n,) of the linear predictor


def first_rows(table: Any, model: Model) -> tuple[Design, Block]:
    """Return what is read of a file, and its first rows, given as Arrow's table."""
    arrow = extra("pyarrow")
    plan = plain_design(table.schema, model)
    if plan is None:
        plan = design(as_frame(table), model)
        return plan, read_block(plan, table)
    whole = table.combine_chunks().to_batches()[0]
    found = _plain(arrow, plan, whole)
    if found is None:
        return plan, read_block(plan, table)
    n = len(found.y)
    X = np.stack([np.broadcast_to(column, n) for column in found.features], axis=1)
    labels = np.asarray(found.labels, object)[found.codes]
    if plan.client is not None and arrow.types.is_integer(table.schema.field(plan.client).type):
        labels = np.from_dlpack(whole.column(plan.client))
    X, y = X.astype(np.float64, copy=False), found.y.astype(np.float64)
    return plan, Block(X, y, labels, 0, found.weight, found.offset)


def plain_design(schema: Any, model: Model) -> Design | None:
    """Return what `design` does if all columns are numbers and nothing is to be refused; else None.

    It spares a file of numbers the import of pandas, which takes longer than reading a million rows.
    """
    response, client, features = model.response, model.client, model.features
    types, names = extra("pyarrow").types, schema.names
    if model.formula is not None or len(set(names)) < len(names):
        return None
    others = [one for one in (model.row_weights, model.offset, model.exposure) if one is not None]
    if response == client or not {response, client, *others, *(features or ())} <= {None, *names}:
        return None
    if response in (features or ()) or {response, client} & set(others):
        return None
    chosen = [one for one in names if one not in (response, client, *others)]
    chosen = chosen if features is None else list(features)
    named = ((INTERCEPT,) if model.intercept else ()) + tuple(chosen)
    if response is None or not chosen or len(set(named)) < len(named):
        return None
    kinds = [schema.field(name).type for name in (response, *chosen, *others)]
    if not all(types.is_integer(one) or types.is_floating(one) for one in kinds):
        return None
    columns = (response, *(() if client is None else (client,)), *chosen)
    columns += tuple(name for name in others if name not in columns)
    more = (model.row_weights, model.offset, model.exposure)
    return Design(response, client, named, columns, model.missing, None, model.intercept, *more)


def read_block(plan: Design, table: Any, first_row: int = 0) -> Block:
    """Return rows of an Arrow table, by way of pandas; `first_row` rows came before, for messages."""
    whole = table.select(list(plan.columns))
    if plan.missing == "drop":
        # Before pandas, which would turn whole numbers with gaps into fractions, and client 1 into 1.0.
        whole = whole.drop_null()
    block = plan.read(as_frame(whole), first_row)
    return block._replace(dropped=block.dropped + table.num_rows - whole.num_rows)


def read_columns(plan: Design, batch: Any, first_row: int = 0) -> Columns:
    """Return the rows of a batch; refuse what `Design.read` refuses."""
    arrow = extra("pyarrow")
    found = _plain(arrow, plan, batch)
    if found is not None:
        return found
    block = read_block(plan, arrow.Table.from_batches([batch]), first_row)
    codes, labels = extra("pandas").factorize(block.client)
    labels = [str(one) for one in labels]
    return Columns([*block.X.T], block.y, codes, labels, block.dropped, block.weight, block.offset)


def _plain(arrow: Any, plan: Design, batch: Any) -> Columns | None:
    """Return columns that are numbers without gaps; None if one of them needs pandas."""
    if plan.spec is not None:
        return None
    y = _column_numbers(arrow, batch.column(plan.response))
    ones = plan.intercept
    names = [name for name in plan.names if name != INTERCEPT or not ones]
    features = [_column_numbers(arrow, batch.column(name)) for name in names]
    who = _clients(arrow, plan, batch)
    more = {
        name: None if name is None else _column_numbers(arrow, batch.column(name))
        for name in (plan.row_weights, plan.offset, plan.exposure)
    }
    gaps = any(name is not None and column is None for name, column in more.items())
    if y is None or who is None or gaps or any(column is None for column in features):
        return None
    weight = more[plan.row_weights]
    weight = None if weight is None else plan.checked_weight(weight)
    offset = plan.checked_offset(more[plan.offset], more[plan.exposure])
    return Columns([1.0, *features] if ones else features, y, *who, 0, weight, offset)


def _column_numbers(arrow: Any, column: Any) -> NDArray[Any] | None:
    """Return a column as it is in memory, if all of it is finite."""
    kind = column.type
    if arrow.types.is_boolean(kind):
        column = column.cast(arrow.uint8())
    elif not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind)):
        return None
    if column.null_count:
        return None
    found = np.from_dlpack(column)
    # A sum is cheaper than `isfinite` of each; if it overflows, the column goes by way of pandas.
    with np.errstate(over="ignore", invalid="ignore"):
        return found if np.isfinite(found.sum()) else None


def client_counts(plan: Design, table: Any) -> NDArray[np.integer[Any]] | None:
    """Return how many rows each client has, in no order; None if labels need pandas."""
    found = _clients(extra("pyarrow"), plan, table.combine_chunks().to_batches()[0])
    if found is None:
        return None
    counts = np.bincount(found[0])
    return counts[counts > 0]


def _clients(arrow: Any, plan: Design, batch: Any) -> tuple[NDArray[Any], list[str]] | None:
    """Return codes and labels, if Arrow's labels read as NumPy's do."""
    if plan.client is None:
        return np.zeros(batch.num_rows, np.int8), ["0"]
    column, types = batch.column(plan.client), arrow.types
    if types.is_integer(column.type) and not column.null_count and len(column):
        values: Any = np.from_dlpack(column)
        low, high = int(values.min()), int(values.max())
        if high - low < _NEAR:
            return values - low, [str(one) for one in range(low, high + 1)]
    if not types.is_dictionary(column.type):
        column = column.dictionary_encode()
    kind = column.dictionary.type
    simple = types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)
    if not simple or column.null_count or column.dictionary.null_count:
        return None
    labels = [str(one) for one in column.dictionary.to_pylist()]
    if any(map(is_gap, labels)):
        return None
    return np.from_dlpack(column.indices), labels

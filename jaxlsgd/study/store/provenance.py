"""Record what made the rows of a directory: versions, devices, and the package's own code."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from jaxlsgd.study.study import differences


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def other_code(
    directory: Path, manifest: dict[str, Any], environment: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the last environment of other code that has made rows here; None if there is none."""
    known = manifest.get("environments", [])
    codes = {x.get("code") for x in known}
    ours = environment.get("code")
    if ours is None or codes <= {None} or ours in codes or not _has_rows(directory):
        return None
    return next(x for x in reversed(known) if x.get("code"))


def _has_rows(directory: Path) -> bool:
    """Whether a tile was committed."""
    return next(directory.glob("cells/*/tile-*.npz"), None) is not None


def refusal(directory: Path, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the message for rows of other code that are not accepted."""
    return (
        f"{directory} has rows that other code of jaxlsgd made ({_named(old)}; here {_named(new)}); "
        "go back to that code, choose a new directory, or accept rows of both with "
        "--allow-other-code (from Python: allow_other_code=True)"
    )


def _named(environment: dict[str, Any]) -> str:
    return f"version {environment.get('jaxlsgd', '?')}, code {environment.get('code')}"


def settled(
    directory: Path, manifest: dict[str, Any], environment: dict[str, Any], warnings: list[str]
) -> dict[str, Any]:
    """Return the manifest's entries on what made the rows, with this run; append warnings of differences."""
    known = list(manifest.get("environments", []))
    accepted = list(manifest.get("accepted", []))
    if not known or not _has_rows(directory):
        return {"environments": [environment]}
    if old := other_code(directory, manifest, environment):
        warnings.append(
            f"rows of other code are kept beside new ones, as allowed: {_named(old)}; here "
            f"{_named(environment)}"
        )
        codes = {"before": old["code"], "now": environment["code"]}
        accepted.append(codes | {"time": now()})
    elif environment not in known:
        changed = "; ".join(differences(known[-1], environment))
        warnings.append(f"rows may differ in their last digits from earlier ones: {changed}")
    if environment not in known:
        known.append(environment)
    return {"environments": known} | ({"accepted": accepted} if accepted else {})

"""The log of a directory of results: plain text beside the rows, one line per event, never rewritten."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from jaxlsgd.core.text import printable
from jaxlsgd.study.progress import Silent, Totals
from jaxlsgd.study.store import place, provenance
from jaxlsgd.study.store.codec import StoreError


class Journal:
    """Appends lines to `run.log`. A log that cannot be written must not end a study.

    Args:
      directory: of the results, held by the writer.
    """

    def __init__(self, directory: Path) -> None:
        self.problem = ""  # why there is no log
        self._lock, self._handle = threading.Lock(), -1
        path, flags = directory / place.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            self._handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            place.refuse_shared(path, self._handle)
            if not os.fstat(self._handle).st_size:
                os.write(self._handle, place.LOG_HEAD.encode())
        except (OSError, StoreError) as error:
            self.problem = f"no log is kept: {getattr(error, 'strerror', None) or error}"
            self.close()

    def note(self, text: str) -> None:
        """Adds a line; further lines of the text are indented."""
        line = printable(text).replace("\n", "\n    ")
        content = f"{provenance.now()} {line}\n".encode(errors="backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if self._handle >= 0:
                os.write(self._handle, content)

    def close(self) -> None:
        """Ends."""
        with self._lock, contextlib.suppress(OSError):
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1


class Noted(Silent):
    """Progress that is also noted in a journal, once there is one."""

    def __init__(self, inner: Silent) -> None:
        self._inner = inner
        self._journal: Journal | None = None
        self._early: list[str] = []

    def attach(self, journal: Journal) -> None:
        """Notes everything from now on, and what was said before."""
        self._journal = journal
        if journal.problem:
            self._inner.say(journal.problem)
        for text in self._early:
            journal.note(text)

    def note(self, text: str) -> None:
        """Notes something that is not shown."""
        if self._journal is None:
            self._early.append(text)
        else:
            self._journal.note(text)

    def start(self, totals: Totals) -> None:
        self._inner.start(totals)

    def advance(self, replications: float, work: float) -> None:
        self._inner.advance(replications, work)

    def begin(self) -> None:
        self._inner.begin()

    def cell_done(self) -> None:
        self._inner.cell_done()

    def tick(self) -> None:
        self._inner.tick()

    def say(self, text: str) -> None:
        self.note(text)
        self._inner.say(text)

    def close(self) -> None:
        self._inner.close()


def started(environment: dict[str, Any]) -> str:
    """The line that a run begins with: who, and with what."""
    what = ", ".join(f"{key} {value}" for key, value in environment.items() if value)
    return f"start: process {os.getpid()} on {os.uname().nodename}; {what}"

"""Do the clients agree? From final messages alone: nobody fits by itself, so that small or separated clients are no obstacle."""

from __future__ import annotations

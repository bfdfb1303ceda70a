"""A run as it is now, for whoever looks from outside the job: from its folder, or from the page that it serves."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..utils.files import FileError
from .event_log import EventReader, holds_events
from .records import RecordError
from .state import RunState
from .view import view_of

TIMEOUT_SECONDS = 5.0
MOST_BYTES = 64 << 20
"""Of an answer."""
_LARGEST = 1 << 26

View = dict[str, Any]


class ViewError(FileError):
    """There is no run to look at; one line that says why."""


class Source(Protocol):
    """Where a run is seen."""

    def view(self) -> View:
        """The view as `view.view_of` makes it, with ``progress`` where the job says it.

        Raises:
            ViewError: there is nothing, or nothing any more.
        """


def source_of(place: str, token: str | None = None) -> Source:
    """A folder of a run, or the address of a live page.

    Args:
        token: that the page wants; it may also stand in the address, as ``?token=...``.

    Raises:
        ViewError: it is neither.
    """
    if "://" in place:
        return PageSource(place, token)
    return FolderSource(Path(place))


class FolderSource:
    """Reads what has been written since the last look."""

    def __init__(self, run: Path) -> None:
        if not run.exists():
            raise ViewError(f"{run}: there is no such folder")
        if not holds_events(run):
            raise ViewError(f"{run}: no folder of a run (BalancerConfig(run=...) writes one), or nothing in it yet")
        self._reader = EventReader(run)
        self._state = RunState()
        self._run = run

    def view(self) -> View:
        for record in self._reader.new():
            try:
                self._state.apply(record)
            except RecordError:
                continue  # of a job that wrote something else: what can be used is shown
        if not self._state.job:
            raise ViewError(f"{self._run}: its log does not say what job it is of")
        return {**view_of(self._state), "progress": None}


class PageSource:
    """Asks the server of a live page."""

    def __init__(self, address: str, token: str | None) -> None:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ViewError(f"{address}: give an address as http://127.0.0.1:8265")
        found = urllib.parse.parse_qs(parts.query).get("token", [None])[0]
        self._token = token or found
        self._shown = f"{parts.scheme}://{parts.netloc}"
        self._view: View | None = None

    def view(self) -> View:
        after = -1 if self._view is None else self._view["version"]
        answer = self._ask(f"{self._shown}/state?after={after}")
        if isinstance(answer, dict) and isinstance(answer.get("view"), dict):
            self._view = answer["view"]
        if self._view is None or not isinstance(answer, dict) or "version" not in self._view:
            raise ViewError(f"{self._shown}: it answers, but it is not a page of ours")
        return {**self._view, "progress": answer.get("progress")}

    def _ask(self, address: str) -> Any:
        request = urllib.request.Request(address)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        opener = urllib.request.build_opener(_StayHere)
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                content = response.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            wanted = ": it wants a token (--token)" if error.code in (401, 403) else ""
            raise ViewError(f"{self._shown}: {error.code} {error.reason}{wanted}") from None
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", error)
            raise ViewError(f"{self._shown}: no answer ({why})") from None
        if len(content) > MOST_BYTES:
            raise ViewError(f"{self._shown}: it answers with more than {MOST_BYTES >> 20} MiB")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise ViewError(f"{self._shown}: it answers, but it is not a page of ours") from None


class _StayHere(urllib.request.HTTPRedirectHandler):
    """A token is for one server."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def unpacked(packed: Any) -> NDArray[Any] | None:
    """A matrix of a view; None where there is none.

    Raises:
        ViewError: it is none of ours.
    """
    if packed is None:
        return None
    try:
        kind = np.dtype({"i4": "<i4", "f8": "<f8"}[packed["kind"]])
        shape = [int(length) for length in packed["shape"]]
        if any(length < 0 for length in shape) or int(np.prod(shape, dtype=object)) > _LARGEST:
            raise ValueError(f"shape {shape}")
        return np.frombuffer(base64.b64decode(packed["data"], validate=True), kind).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise ViewError(f"a matrix that cannot be read: {error}") from None

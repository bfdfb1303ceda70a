"""The page of a run as one HTML file: with its data inside (a report), or served by rank 0 while the job runs.

The server answers GET for a fixed list of paths and opens no file that a request names. Requests that another web page
makes are refused (another Origin, or a Host that is no name of this server: DNS rebinding). A token, where one is set,
is required for every path. Each connection serves one request on its own thread; a silent client is let go, and one
that takes its time when others come.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from numpy.typing import NDArray

from ..load.series import holds_series
from ..utils.files import FileError
from .events_file import NAME
from .metrics import expert_work_text, predictions_text, summary_of, summary_text
from .run_state import LINKS, RunState, state_of_run

SCRIPTS = ("draw.js", "page.js")
_JOB = ("time", "package", "layers", "experts", "ranks", "slots_per_rank", "policy", "interval", "replica_slots")
_STATE = ("version", "starts", "step", "standing", "cause", "epoch", "placed_at")
_TOTALS = ("rebalances", "placed_replicas", "pause_seconds", "rollouts", "rollout_seconds", "saved_seconds")


def page(told: Mapping[str, Any] | None = None) -> str:
    """Return the page as HTML with its style and scripts inside; its policy (CSP) lets nothing else run. ``told``: data
    that a report shows; None: the page asks its server."""
    style, *scripts = ((files(__package__) / "page" / name).read_text() for name in ("page.css", *SCRIPTS))
    hashes = " ".join(_hash(script) for script in scripts)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {hashes}; connect-src 'self'; img-src data:"
    head = f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}; base-uri 'none'; form-action 'none'\">"
    data = ""
    if told is not None:
        content = json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        data = f'<script type="application/json" id="data">{content}</script>\n'
    found = (files(__package__) / "page" / "page.html").read_text()
    for old, new in (
        ('<link rel="stylesheet" href="page.css">', f"{head}\n<style>{style}</style>"),
        (f'<script src="{SCRIPTS[0]}"></script>', f"{data}<script>{scripts[0]}</script>"),
        (f'<script src="{SCRIPTS[1]}"></script>', f"<script>{scripts[1]}</script>"),
    ):
        before, _, after = found.partition(old)
        found = before + new + after
    return found


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def view_of(state: RunState) -> dict[str, Any]:
    """Return what the page shows, JSON-able: matrices as base64 of little-endian int32 and float64, no NaN. Locks."""
    with state.lock:
        measured = state.measured
        if measured is not None:
            arrays = ("load", "rank_load", "imbalance", "imbalance_start")
            measured = {"step": measured["step"]} | {name: _packed(measured[name]) for name in arrays}
        curve = ("step", "mean", "worst", "start_mean", "step_seconds")
        found: dict[str, Any] = finite(
            {name: getattr(state, name) for name in _STATE}
            | {
                "job": {name: state.job.get(name) for name in _JOB},
                "measured": measured,
                "predictions": predictions_text(state.predictions),
                "expert_work": expert_work_text(state.share.value, state.share.source),
                "placement": _packed(state.placement),
                "placement_before": _packed(state.placement_before),
                "decisions": list(state.decisions),
                "troubles": list(state.troubles),
                "curve": {name: [round(point[name], 6) for point in state.curve] for name in curve},
                "totals": {
                    **{name: getattr(state, name) for name in _TOTALS},
                    "decisions": sum(state.decided.values()),
                    "moved_experts": {link: state.moved_experts[link] for link in LINKS},
                    "moved_bytes": {link: state.moved_bytes[link] for link in LINKS},
                    "phase_seconds": dict(state.phase_seconds),
                },
            }
        )
    return found


def _packed(array: NDArray[Any] | None) -> dict[str, Any] | None:
    if array is None:
        return None
    is_whole = array.dtype.kind == "i" and (not array.size or np.abs(array).max() < 2**31)
    kind, content = ("i4", array.astype("<i4")) if is_whole else ("f8", array.astype("<f8"))
    return {"kind": kind, "shape": list(array.shape), "data": base64.b64encode(content.tobytes()).decode()}


def finite(value: Any) -> Any:
    """Return a value as JSON gives it back, with None in place of NaN and infinities, which JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


# -- reports ---------------------------------------------------------------------------------------------------------


def report_of(source: Path) -> tuple[str, dict[str, Any], str]:
    """Return the report of a run's folder: the HTML page with the data inside, the summary as a dict, and the summary
    as text. FileError: the folder has no events of a balancer's run. OSError: it cannot be read."""
    if source.is_dir() and holds_series(source) and not (source / NAME).exists():
        raise FileError(f"{source}: recorded without a balancer: eplb-runtime assess {source} says its imbalance")
    state = state_of_run(source)
    summary = summary_of(state)
    html = page({"title": f"{source.resolve().name}: eplb_runtime", "view": view_of(state)})
    return html, summary, summary_text(summary, source)


# -- the server --------------------------------------------------------------------------------------------------------

logger = logging.getLogger("eplb_runtime")

MOST_CONNECTIONS, REQUEST_SECONDS = 16, 10.0  # at once; the longest wait for a client, who has twice that in all
COOKIE = "eplb_runtime_token"
TOKEN_MISSING = b"a token is required: open /?token=... once, or send it as 'Authorization: Bearer ...'\n"
_HEADERS = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)


class Answer(NamedTuple):
    content: bytes  # of a path
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()


Route = Callable[[Mapping[str, str]], Answer]  # called with the query's parameters by name


class PageServer(socketserver.ThreadingTCPServer):
    """Serves routes on its own thread until ``close``.

    Args:
        host, port: address to listen on; port 0: any free one, see ``port``.
        token: that every request must carry; None: none.
        routes: by path.

    Raises OSError: the address is taken, or not of this machine.
    """

    daemon_threads = allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, token: str | None, routes: Mapping[str, Route]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host, self.token, self.routes = host, token, routes
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._open: dict[Any, float] = {}
        super().__init__((host, port), Handler)
        self.socket.settimeout(REQUEST_SECONDS)
        self.port = int(self.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        threading.Thread(target=self.serve_forever, args=(0.1,), name="eplb_runtime page", daemon=True).start()

    def close(self) -> None:
        """Stop listening, also where a forked child has the socket. Requests under way go on, on daemon threads."""
        self.shutdown()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Count the connection as open, cut off those that are open for too long, and return whether this is served: no
        more than 16 are open at once. The server closes a connection that is not served."""
        self._open[request] = now = time.monotonic()
        for other in [one for one, since in [*self._open.items()] if now - since > 2 * REQUEST_SECONDS]:
            with suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
        return len(self._open) <= MOST_CONNECTIONS

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        logger.debug("a request to the page failed", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "eplb_runtime", ""
    error_message_format, error_content_type = "%(code)d %(message)s\n", "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        content, content_type, status, more = self._answer()
        self.send_response(status)
        for name, value in (*_HEADERS, *more, ("Content-Type", content_type), ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with a status code and its standard text; the other arguments may repeat the request."""
        super().send_error(code)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a token may be in a path."""

    def _answer(self) -> Answer:
        if not self._is_for_this_server():
            return Answer(b"this address serves its own page only\n", status=HTTPStatus.FORBIDDEN)
        try:
            path, query = urlsplit(self.path).path, dict(parse_qsl(urlsplit(self.path).query, max_num_fields=10))
        except ValueError:
            return Answer(b"no such request\n", status=HTTPStatus.BAD_REQUEST)
        if self.path.startswith("/?") and self._is_token(query.get("token", "")):
            # A cookie takes the token out of the address, which histories keep.
            cookie = f"{COOKIE}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            return Answer(b"let in\n", "text/plain", HTTPStatus.SEE_OTHER, (("Location", "/"), ("Set-Cookie", cookie)))
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        cookies = [part.strip().removeprefix(f"{COOKIE}=") for part in self.headers.get("Cookie", "").split(";")]
        if self.server.token is not None and not any(map(self._is_token, [bearer, *cookies])):
            return Answer(TOKEN_MISSING, status=HTTPStatus.UNAUTHORIZED, headers=(("WWW-Authenticate", "Bearer"),))
        if path not in self.server.routes:
            return Answer(b"nothing here\n", status=HTTPStatus.NOT_FOUND)
        try:
            return self.server.routes[path](query)
        except Exception:
            logger.debug("%s cannot be shown", path, exc_info=True)
            return Answer(b"this cannot be shown; the job goes on\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def _is_for_this_server(self) -> bool:
        """Return whether no other page asks, and the name is ours or an IP address, which no foreign one is."""
        hosts, site = self.headers.get_all("Host") or [""], self.headers.get("Sec-Fetch-Site", "none")
        is_own = site in ("none", "same-origin") or self.headers.get("Sec-Fetch-Mode") == "navigate"
        own = f"http://{hosts[0]}"
        if len(hosts) == 1 and self.headers.get("Origin", own) == own and is_own:
            with suppress(ValueError):
                name = urlsplit(own).hostname or ""
                return name in self.server.names or bool(ipaddress.ip_address(name))
        return False

    def _is_token(self, token: str) -> bool:
        expected = self.server.token
        return expected is not None and hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())

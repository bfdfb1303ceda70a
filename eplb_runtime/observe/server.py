"""Rank 0's small server: the live page at ``/``, the metrics at ``/metrics``.

It answers GET for a fixed list of paths and opens no file that a request names. Requests that another web page makes
are refused (another Origin, or a Host that is no name of this server: DNS rebinding). A token, where one is set, is
required for every path. Each connection serves one request on its own thread; a silent client is let go.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

logger = logging.getLogger("eplb_runtime")

MOST_CONNECTIONS, REQUEST_SECONDS = 16, 10.0  # at once; the longest wait for a client
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
        self._open: set[Any] = set()
        super().__init__((host, port), Handler)
        self.socket.settimeout(REQUEST_SECONDS)
        self.port = int(self.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        threading.Thread(target=self.serve_forever, args=(0.1,), name="eplb_runtime page", daemon=True).start()

    def close(self) -> None:
        """Stop listening. What is asked by then is answered, or dies with the process."""
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: object) -> bool:
        """Return whether there is a connection left for one more request."""
        self._open.add(request)
        return len(self._open) <= MOST_CONNECTIONS

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
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
        """Answer without repeating the request."""
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

"""Rank 0's small server: the live page at ``/``, the metrics at ``/metrics``.

It answers GET for a fixed list of paths and opens no file that a request names. Requests that another web page makes
are refused (another Origin, or a Host that is no name of this server: DNS rebinding). A token, where one is set, is
required for every path. Each connection serves one request on its own thread; a silent client is let go.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

logger = logging.getLogger("eplb_runtime")

MOST_CONNECTIONS = 16
REQUEST_SECONDS, CLOSING_SECONDS = 10.0, 5.0
"""Longest wait for a client, and for the server's thread to end."""
COOKIE = "eplb_runtime_token"
TOKEN_MISSING = "a token is required: open /?token=... once, or send it as 'Authorization: Bearer ...'\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Answer(NamedTuple):
    """Content of a path."""

    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = MappingProxyType({})


Route = Callable[[Mapping[str, str]], Answer]
"""Called with the query's parameters by name."""


class PageServer(ThreadingHTTPServer):
    """Serves routes on its own thread until ``close``.

    Args:
        host, port: address to listen on; port 0: any free one, see ``port``.
        token: that every request must carry; None: none.
        routes: by path.

    Raises:
        OSError: the address is taken, or not of this machine.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, token: str | None, routes: Mapping[str, Route]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host, self.token, self.routes = host, token, routes
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._open: set[socket.socket] = set()
        super().__init__((host, port), Handler)
        self.port = int(self.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        threading.Thread(target=self.serve_forever, args=(0.1,), name="eplb_runtime page", daemon=True).start()

    def server_bind(self) -> None:
        """Bind without the look-up of this machine's full name, which may take long."""
        socketserver.TCPServer.server_bind(self)

    def close(self) -> None:
        """Stop listening. A thread that does not end in time dies with the process."""
        closing = threading.Thread(target=self.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        self.server_close()
        for request in list(self._open):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def process_request(self, request, client_address) -> None:  # type: ignore[no-untyped-def]
        if len(self._open) >= MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:  # type: ignore[no-untyped-def]
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request to the page failed", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "eplb_runtime", ""
    error_message_format, error_content_type = "%(code)d %(message)s\n", "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        content, content_type, status, more = self._answer()
        headers = {**_HEADERS, **more, "Content-Type": content_type}
        if len(content) > 1000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            content, headers["Content-Encoding"] = gzip.compress(content, compresslevel=1), "gzip"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer without repeating the request."""
        super().send_error(code)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a token may be in a path."""

    def _answer(self) -> Answer:
        if not self._is_for_this_server():
            return Answer(b"this address serves its own page only\n", status=HTTPStatus.FORBIDDEN)
        try:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=10).items()}
        except ValueError:
            return Answer(b"no such request\n", status=HTTPStatus.BAD_REQUEST)
        if self.path.startswith("/?") and self._is_token(query.get("token", "")):
            # A cookie takes the token out of the address, which histories keep.
            cookie = f"{COOKIE}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            headers = {"Location": "/", "Set-Cookie": cookie}
            return Answer(b"let in\n", status=HTTPStatus.SEE_OTHER, headers=headers)
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        cookies = [part.strip().removeprefix(f"{COOKIE}=") for part in self.headers.get("Cookie", "").split(";")]
        if self.server.token is not None and not any(map(self._is_token, [bearer, *cookies])):
            headers = {"WWW-Authenticate": "Bearer"}
            return Answer(TOKEN_MISSING.encode(), status=HTTPStatus.UNAUTHORIZED, headers=headers)
        if parts.path not in self.server.routes:
            return Answer(b"nothing here\n", status=HTTPStatus.NOT_FOUND)
        try:
            return self.server.routes[parts.path](query)
        except Exception:
            logger.debug("%s cannot be shown", parts.path, exc_info=True)
            said = b"this cannot be shown; the job goes on\n"
            return Answer(said, status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def _is_for_this_server(self) -> bool:
        hosts, origin = self.headers.get_all("Host") or [], self.headers.get("Origin")
        if len(hosts) != 1 or not (self._is_ours(hosts[0]) and origin in (None, f"http://{hosts[0]}")):
            return False
        site = self.headers.get("Sec-Fetch-Site", "none")
        return site in ("none", "same-origin") or self.headers.get("Sec-Fetch-Mode") == "navigate"

    def _is_ours(self, host: str) -> bool:
        """Return whether it is a name of this server, or an IP address, which no foreign name (DNS rebinding) is."""
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.server.names or bool(ipaddress.ip_address(name))
        return False

    def _is_token(self, token: str) -> bool:
        expected = self.server.token
        return expected is not None and hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())

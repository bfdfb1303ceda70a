"""Rank 0's small server: the live page at ``/``, the metrics at ``/metrics``. It listens only where it is told to.

It answers GET for a fixed list of paths and opens no file that a request names. Requests from other web pages (another
Origin, another Host than this server's names: DNS rebinding) are refused; where a token is set it is wanted for
everything. Each connection serves one request on a thread of its own, with a deadline for all of it, and there are few
of them: a browser that hangs, or sends a letter now and then, holds up nobody, least of all training.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

logger = logging.getLogger("eplb_runtime")

MOST_CONNECTIONS = 16
REQUEST_SECONDS = 10.0
"""From the first byte of a request to the last of its answer; who is not through by then is cut off."""
COOKIE = "eplb_runtime_token"
CLOSING_SECONDS = 5.0
_LEAST_COMPRESSED = 1000
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Answer:
    """What a path gives."""

    content: bytes
    content_type: str
    status: HTTPStatus = HTTPStatus.OK


Route = Callable[[Mapping[str, str]], Answer]
"""Given the headers' ``Accept`` and the query's parameters, by name."""


def asset(name: str, content_type: str) -> Route:
    """A file of this package, read now."""
    answer = Answer((files(__package__) / "page" / name).read_bytes(), content_type)
    return lambda _: answer


class PageServer:
    """Serves routes on a thread of its own, from now on until ``close``.

    Args:
        host, port: where it listens; port 0: any that is free.
        token: that every request must bring; None: none.
        routes: by path.

    Attributes:
        port: the one it listens on.

    Raises:
        OSError: the address is taken, or not of this machine.
    """

    def __init__(self, host: str, port: int, token: str | None, routes: Mapping[str, Route]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _Server((host, port), family, token, routes)
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="eplb_runtime page", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    def close(self) -> None:
        """Nothing listens any more. A thread that does not end is left behind: it dies with the process."""
        closing = threading.Thread(target=self._server.shutdown, name="eplb_runtime page closes", daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        self._server.server_close()
        self._server.cut_off(0.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], family: socket.AddressFamily, token: str | None, routes: Mapping[str, Route]
    ) -> None:
        self.address_family = family
        self.token, self.routes = token, routes
        self.names = {"localhost", address[0].lower(), socket.gethostname().lower()}
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        self._open: dict[socket.socket, float] = {}
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Without the look-up of this machine's full name, which may take long."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)  # type: ignore[arg-type]
        except BaseException:  # no thread to be had
            self._is_over(request)
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._is_over(request)

    def service_actions(self) -> None:
        """Between requests, several times a second."""
        self.cut_off(Handler.timeout)

    def cut_off(self, seconds: float) -> None:
        """End connections that are older: a deadline for each read alone would never come for who drips."""
        now = time.monotonic()
        for request, began in list(self._open.items()):
            if now - began >= seconds:
                with suppress(OSError):  # it ends by itself meanwhile
                    request.shutdown(socket.SHUT_RDWR)

    def _is_over(self, request: socket.socket) -> None:
        self._open.pop(request, None)
        self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request to the page failed", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = REQUEST_SECONDS
    server: _Server
    server_version = "eplb_runtime"
    sys_version = ""
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Without a word of what the request was."""
        super().send_error(code)

    def log_message(self, format: str, *args: object) -> None:
        """Who looks at the page is nothing for the job's log; a token in a path still less."""

    def _answer(self) -> None:
        if not self._is_own():
            self._send(_said(HTTPStatus.FORBIDDEN, "this address serves its own page only"))
            return
        try:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query, max_num_fields=10).items()}
        except ValueError:
            self._send(_said(HTTPStatus.BAD_REQUEST, "no such request"))
            return
        if self._lets_in(query.get("token", "")):
            self._send_home()
            return
        if not self._is_let_in():
            wanted = "a token is wanted: open /?token=... once, or send it as 'Authorization: Bearer ...'"
            self._send(_said(HTTPStatus.UNAUTHORIZED, wanted), {"WWW-Authenticate": "Bearer"})
            return
        route = self.server.routes.get(parts.path)
        if route is None:
            self._send(_said(HTTPStatus.NOT_FOUND, "nothing here"))
            return
        try:
            answer = route({**query, "Accept": self.headers.get("Accept", "")})
        except Exception:
            logger.debug("%s cannot be shown", parts.path, exc_info=True)
            answer = _said(HTTPStatus.INTERNAL_SERVER_ERROR, "this cannot be shown; the job goes on")
        self._send(answer)

    def _is_own(self) -> bool:
        """Whether the request means this server by one of its names, and no other page has made it.

        A name of somebody else's that leads here (DNS rebinding) is never an IP address.
        """
        host = self.headers.get("Host", "")
        if len(self.headers.get_all("Host") or []) != 1 or not (_is_address(host) or _name(host) in self.server.names):
            return False
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return False
        site = self.headers.get("Sec-Fetch-Site", "none")
        return site in ("none", "same-origin") or self.headers.get("Sec-Fetch-Mode") == "navigate"

    def _lets_in(self, token: str) -> bool:
        return bool(token) and self.path.startswith("/?") and self._is_token(token)

    def _is_let_in(self) -> bool:
        if self.server.token is None:
            return True
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(token.strip()):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, token: str) -> bool:
        """Compared in a time that tells nothing of where they differ."""
        wanted = self.server.token
        return wanted is not None and hmac.compare_digest(token.encode("utf-8", "replace"), wanted.encode())

    def _send_home(self) -> None:
        """The token goes from the address, where histories keep it, into a cookie that scripts cannot read."""
        cookie = f"{COOKIE}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
        self._send(_said(HTTPStatus.SEE_OTHER, "let in"), {"Location": "/", "Set-Cookie": cookie})

    def _send(self, answer: Answer, more: Mapping[str, str] | None = None) -> None:
        content, headers = answer.content, {**_HEADERS, **(more or {})}
        if len(content) > _LEAST_COMPRESSED and "gzip" in self.headers.get("Accept-Encoding", ""):
            content = gzip.compress(content, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _said(status: HTTPStatus, text: str) -> Answer:
    return Answer(f"{text}\n".encode(), "text/plain; charset=utf-8", status)


def _name(host: str) -> str:
    """Without the port."""
    return host.lower().partition(":")[0]


def _is_address(host: str) -> bool:
    bare = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return False
    return True

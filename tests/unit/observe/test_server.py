"""Rank 0's server serves its page, to whom it should, and nothing else."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed import TOPOLOGY, decisions, start

from eplb_runtime import BalancerConfig
from eplb_runtime.config import ConfigError
from eplb_runtime.events import EventLog
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe import server as server_module
from eplb_runtime.observe.server import PageServer
from eplb_runtime.observe.start import Shown

TOKEN = "abcdefgh-01234567"


def shown(listen: int | str | None = 0, token: str | None = None, run: Path | None = None) -> tuple[Shown, EventLog]:
    config = BalancerConfig(interval=5, replica_slots=1, listen=listen, listen_token=token, run=run)
    made, log = Shown(config, TOPOLOGY, start(), 4, lambda: Progress(17, 0.25, 1.0)), EventLog()
    made.follow(log)
    return made, log


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    made, log = shown()
    for heard in decisions(2):
        for event in heard:
            log.emit(event)
    assert made.server is not None
    yield made.server
    made.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[PageServer]:
    made, _ = shown("127.0.0.1:0", TOKEN)
    assert made.server is not None
    yield made.server
    made.close()


def test_a_job_that_has_failed_ends_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "eplb_runtime"):
        shown(None)[0].close()
        assert caplog.text.count("the balancer's run: ") == 1
        monkeypatch.setattr(sys, "last_value", RuntimeError("the job's"), raising=False)
        shown(None)[0].close()
    assert caplog.text.count("the balancer's run: ") == 1


def get(server: PageServer, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """``Host`` as given, or the right one."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with closing(connection):
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": f"127.0.0.1:{server.port}", **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        response.content = response.read()  # type: ignore[attr-defined]
        return response


def test_nothing_listens_unless_asked() -> None:
    made, _ = shown(None)
    assert made.server is None
    made.close()
    made, _ = shown(0)
    assert made.server is not None and made.server.host == "127.0.0.1"
    port = made.server.port
    made.close()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


@pytest.mark.parametrize("address", ["0.0.0.0:8080", "[::]:8080", "node7:8080", 70000, "here", True])
def test_an_address_that_is_open_or_wrong_is_refused(address: Any) -> None:
    with pytest.raises(ConfigError, match="listen"):
        BalancerConfig(listen=address)


@pytest.mark.parametrize("token", ["short", "with space; Path=/"])
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        BalancerConfig(listen=8080, listen_token=token)


def test_a_token_is_never_shown() -> None:
    config = BalancerConfig(listen="0.0.0.0:8080", listen_token=TOKEN)
    assert TOKEN not in repr(config) + str(config.described()) and config.listen_address == ("0.0.0.0", 8080)
    assert BalancerConfig(listen="[::1]:80").listen_address == ("::1", 80)
    assert BalancerConfig(listen="8080").listen_address == ("127.0.0.1", 8080)


def test_the_page_is_served(server: PageServer) -> None:
    response = get(server, "/")
    assert response.status == 200 and response.headers["Content-Type"].startswith("text/html")
    assert b"default-src 'none'" in response.content and response.headers["X-Frame-Options"] == "DENY"
    assert get(server, "/", "POST").status == 501


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
    ],
)
def test_requests_that_another_page_has_made_are_refused(server: PageServer, headers: dict[str, str]) -> None:
    """Another Host is DNS rebinding."""
    response = get(server, "/state", **headers)
    assert response.status == 403 and b"decisions" not in response.content


@pytest.mark.parametrize(
    "path",
    ["/../events.jsonl", "/%2e%2e/pyproject.toml", "//etc/passwd", "/page/../../server.py", "/server.py", "/load", "*",
     "/state/../x", "http://evil.example/state", "/page.js", "/%00", "/page.html"],
)  # fmt: skip
def test_no_path_reads_another_file(server: PageServer, path: str) -> None:
    response = get(server, path)
    assert response.status in (200, 400, 404)
    if response.status == 200:
        assert path == "http://evil.example/state" and b'"progress"' in response.content


def test_a_token_is_wanted_for_everything(guarded: PageServer) -> None:
    for path in ("/", "/state", "/metrics", "/nothing", f"/state?token={TOKEN}"):
        assert get(guarded, path).status == 401
    for wrong in (TOKEN[:-1], TOKEN + "x", "", "\u00e9", TOKEN.upper()):
        assert get(guarded, "/", Authorization=f"Bearer {wrong}".encode().decode("latin-1")).status == 401
        assert get(guarded, "/", Cookie=f"eplb_runtime_token={wrong}".encode().decode("latin-1")).status == 401
    assert get(guarded, "/state", Authorization=f"Bearer {TOKEN}").status == 200


def test_a_token_in_the_address_becomes_a_cookie(guarded: PageServer) -> None:
    response = get(guarded, f"/?token={TOKEN}")
    cookie = response.headers["Set-Cookie"]
    assert response.status == 303 and response.headers["Location"] == "/"
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert get(guarded, "/state", Cookie=cookie.partition(";")[0]).status == 200
    assert get(guarded, "/?token=wrong-token").status == 401
    assert get(guarded, f"/?token={TOKEN}", Host="evil.example").status == 403


requests = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda method, path, version, headers: b"%s %s %s\r\n%s\r\n\r\n" % (method, path, version, headers),
        st.sampled_from([b"GET", b"HEAD", b"POST", b"G\0T"]),
        st.binary(max_size=60).map(lambda path: b"/" + path),
        st.sampled_from([b"HTTP/1.1", b"HTTP/9.9", b"HTTP/1.0", b"HTTP/x"]),
        st.lists(
            st.tuples(st.sampled_from([b"Host", b"Origin", b"Cookie", b"Authorization", b"X"]), st.binary(max_size=40)),
            max_size=5,
        ).map(lambda pairs: b"\r\n".join(b"%s: %s" % pair for pair in pairs)),
    ),
)


@settings(max_examples=60)
@given(request=requests)
def test_a_malformed_request_hurts_nobody(guarded: PageServer, request: bytes) -> None:
    """It gets no content, nor itself, and the server serves the next one."""
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=30) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert b"idle_seconds" not in answer and b"Traceback" not in answer and TOKEN.encode() not in answer
    assert get(guarded, "/state", Authorization=f"Bearer {TOKEN}").status == 200


def test_browsers_that_hang_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the few connections there are until their time is over; events go on meanwhile."""
    monkeypatch.setattr(server_module.Handler, "timeout", 1.0)
    made, log = shown()
    assert made.server is not None
    hanging = [socket.create_connection(("127.0.0.1", made.server.port)) for _ in range(40)]
    for connection in hanging[:20]:
        connection.sendall(b"GET /state HTTP/1.1\r\n")
    for heard in decisions(1):
        for event in heard:
            log.emit(event)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if get(made.server, "/state").status == 200:
                break
        except (ConnectionError, http.client.HTTPException):
            continue
    else:
        pytest.fail("the page never came back")
    made.close()
    for connection in hanging:
        connection.close()
    assert made.state.rebalances == 1


def test_a_job_ends_with_its_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, log = shown(None, run=tmp_path)
    committed = 0
    for heard in decisions(3):
        for event in heard:
            log.emit(event)
        committed += len(heard) == 3
    with caplog.at_level(logging.INFO):
        made.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rebalances"] == committed == 2 and summary["steps"] == 17 and summary["decisions"] == 3
    assert summary["imbalance"]["measured"] < summary["imbalance"]["start"]
    assert "2 rebalances in 15 measured steps;" in caplog.text

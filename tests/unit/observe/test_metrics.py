"""Each metric is what its name says, reckoned by hand from the events that a job emits."""

import http.client
import json
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.observed import (
    CONFIG,
    EXPERT_BYTES,
    INTERVAL,
    LAYERS,
    PHASES,
    RANKS,
    STEP_SECONDS,
    TOPOLOGY,
    decisions,
    records,
    start,
)

from eplb_runtime import BalancerConfig
from eplb_runtime.config import ConfigError
from eplb_runtime.events import EventLog, LoadMeasured, RebalanceCommitted, RebalancePlanned
from eplb_runtime.load.clock import Progress
from eplb_runtime.observe import metrics
from eplb_runtime.observe import page as server_module
from eplb_runtime.observe.events_file import Record
from eplb_runtime.observe.metrics import metrics_of
from eplb_runtime.observe.page import PageServer
from eplb_runtime.observe.run_state import MOST_DECISIONS, MOST_POINTS, RunState, state_of
from eplb_runtime.observe.start import Observers
from eplb_runtime.planner.evaluate import predicted_imbalance

ROUNDS = 5
PROGRESS = Progress(step=31, step_seconds=0.5, idle_seconds=2.0)


def state(found: list[Record] | None = None) -> RunState:
    return state_of(records(ROUNDS) if found is None else found)


def values(of: RunState) -> dict[str, float]:
    """``name{label=value,...}`` and its value."""
    return {
        f"{metric.name}{sorted(labels.items())}": value
        for metric in metrics_of(of, PROGRESS, now=5000.0)
        for labels, value in metric.samples
    }


def value(found: Mapping[str, float], name: str, **labels: str) -> float:
    return found[f"eplb_{name}{sorted(labels.items())}"]


def test_each_metric_is_what_its_name_says() -> None:
    events = [event for heard in decisions(ROUNDS) for event in heard]
    measured = [event for event in events if isinstance(event, LoadMeasured)]
    planned = [event for event in events if isinstance(event, RebalancePlanned)]
    committed = [event for event in events if isinstance(event, RebalanceCommitted)]
    found, last = values(state()), measured[-1]
    close = {"abs": 1e-5}

    by_layer = np.mean(last.imbalance, axis=0)
    at_start = predicted_imbalance(last.load.astype(np.float64), start()).mean(axis=0)
    for kind, row in (("measured", by_layer), ("start", at_start), ("predicted", planned[-1].by_layer[1])):
        assert value(found, "imbalance", kind=kind, over="mean") == pytest.approx(row.mean(), **close)
        assert value(found, "imbalance", kind=kind, over="max") == pytest.approx(row.max(), **close)
        for layer in range(LAYERS):
            assert value(found, "layer_imbalance", kind=kind, layer=str(layer)) == pytest.approx(row[layer], **close)
    assert value(found, "imbalance", kind="bound", over="mean") == pytest.approx(planned[-1].imbalance_bound, **close)
    assert value(found, "avg_overload_factor") == pytest.approx(by_layer.mean(), **close)
    assert value(found, "max_overload_factor") == pytest.approx(by_layer.max(), **close)
    load_TLE = last.load.astype(np.float64)
    violation_L = (load_TLE.max(axis=2) / load_TLE.mean(axis=2) - 1).mean(axis=0)
    for layer in range(LAYERS):
        assert value(found, "layer_max_vio", layer=str(layer)) == pytest.approx(violation_L[layer], **close)
    assert value(found, "max_vio", over="mean") == pytest.approx(violation_L.mean(), **close)
    assert value(found, "max_vio", over="max") == pytest.approx(violation_L.max(), **close)
    assert value(found, "moe_share", source="assumed") == 0.5
    of_steps = 1 / np.array(last.imbalance)  # mean / max of each step; the reciprocal of the mean imbalance is another
    assert value(found, "balancedness", over="mean") == pytest.approx(of_steps.mean(), **close)
    assert value(found, "balancedness", over="min") == pytest.approx(of_steps.mean(axis=0).min(), **close)
    assert abs(of_steps.mean() - (1 / by_layer).mean()) > 2e-5
    tokens_R = np.array([value(found, "rank_tokens_per_step", rank=str(rank)) for rank in range(RANKS)])
    assert value(found, "max_cum_overload_factor") == pytest.approx(tokens_R.max() / tokens_R.mean(), **close)
    assert tokens_R.sum() == pytest.approx(last.load.sum() / INTERVAL, rel=1e-3)

    assert value(found, "placement_epoch") == len(committed) == value(found, "rebalances") > 1
    assert value(found, "placement_age_steps") == PROGRESS.step - committed[-1].step
    decided = Counter(event.decision for event in planned)
    assert value(found, "decisions", decision="rebalance", reason="pays") == decided["rebalance"]
    assert value(found, "decisions", decision="stay", reason="does not pay") == decided["stay"]
    assert value(found, "pause_seconds") == pytest.approx(len(committed) * sum(PHASES.values()))
    for phase, seconds in PHASES.items():
        assert value(found, "phase_seconds", phase=phase) == pytest.approx(len(committed) * seconds)
    assert value(found, "phase_seconds", phase="plan") == pytest.approx(sum(event.plan_seconds for event in planned))
    stood = sum(INTERVAL for event in measured if event.step > committed[0].step)
    assert value(found, "saved_seconds", kind="predicted") == pytest.approx(stood * 2.0 / CONFIG.horizon)
    saved = 0.0
    for event in measured:
        gain = predicted_imbalance(event.load.astype(np.float64), start()) - np.array(event.imbalance)
        saved += INTERVAL * STEP_SECONDS * 0.5 * gain.mean() / np.mean(event.imbalance)
    assert value(found, "saved_seconds", kind="measured") == pytest.approx(saved, abs=1e-4)

    links: Counter[str] = Counter()
    for event in committed:
        for _, _, source, destination in event.transfers:
            ends = start().rank_of(source), start().rank_of(destination)
            away = "inside a node" if len(set(map(TOPOLOGY.node_of, ends))) == 1 else "between nodes"
            links["inside a rank" if ends[0] == ends[1] else away] += 1
    for link in ("inside a rank", "inside a node", "between nodes"):
        assert value(found, "moved_experts", link=link) == links[link]
        assert value(found, "moved_bytes", link=link) == links[link] * EXPERT_BYTES
    assert links["inside a node"] and links["between nodes"]


def test_a_rebalance_that_commits_a_layer_at_a_time_is_one() -> None:
    job, *decided, commit = records(1, with_troubles=False)
    later = [{**commit, "step": commit["step"] + 1, "left_layers": [1]}, {**commit, "step": commit["step"] + 2}]
    of = state([job, *decided, {**commit, "left_layers": [1, 2]}, *later])
    assert [row["outcome"] for row in of.decisions] == ["committed"] and of.rebalances == 1 and of.promised_seconds == 0
    assert of.decisions[0]["moved_experts"] == 3 * commit["moved_experts"]
    assert np.array_equal(of.placement_before, job["placement"][0])
    of.apply({**decided[0], "step": 99})
    assert of.promised_seconds > 0
    assert [row["outcome"] for row in state([job, *decided, later[0], job]).decisions] == ["dropped"]


def test_the_cumulative_overload_is_that_of_the_worst_pipeline_stage() -> None:
    """Ranks of different stages hold different layers, so a sum over all layers would be nobody's."""
    found = records(ROUNDS)
    rank_load_LR = [record for record in found if record["event"] == "LoadMeasured"][-1]["rank_load"][0]
    stages = rank_load_LR[:1].sum(axis=0), rank_load_LR[1:].sum(axis=0)
    worst = max(load_R.max() / load_R.mean() for load_R in stages)
    staged = [{**found[0], "layers_of_stage": [1, LAYERS - 1]}, *found[1:]]
    assert value(values(state(staged)), "max_cum_overload_factor") == pytest.approx(worst)
    assert value(values(state(found)), "max_cum_overload_factor") < worst - 1e-3


def test_troubles_and_progress_are_counted() -> None:
    found = values(state())
    assert value(found, "aborts", phase="staged") == 1
    assert value(found, "pauses") == value(found, "guard_findings") == value(found, "balancing") == 1
    assert value(found, "steps") == 31 and value(found, "step_seconds") == 0.5
    assert value(found, "last_step_timestamp_seconds") == 4998.0
    lives = [value(values(state(records(2) * lives)), "saved_seconds", kind="predicted") for lives in (1, 2)]
    assert lives[1] == 2 * lives[0] > 0, "what was promised before a restart is over"
    paused = [record for record in records(1) if record["event"] != "BalancingResumed"]
    assert value(values(state(paused)), "balancing") == 0


def test_a_month_of_events_does_not_grow_the_state() -> None:
    """Nor the number of series; and totals and the curve stay right."""
    grown, once = RunState(), records(2, with_troubles=True)
    grown.apply(once[0])
    for _ in range(800):
        for record in once[1:]:
            grown.apply(record)
    names = len(values(grown))
    assert len(grown.curve) <= MOST_POINTS and len(grown.decisions) == MOST_DECISIONS
    assert sum(point["windows"] for point in grown.curve) == 1600
    assert sum(point["steps"] for point in grown.curve) == 1600 * INTERVAL
    mean = sum(point["mean"] * point["windows"] for point in grown.curve) / 1600
    assert mean == pytest.approx(np.mean([np.mean(r["imbalance"]) for r in once if r["event"] == "LoadMeasured"]))
    worst = max(np.mean(record["imbalance"], axis=0).max() for record in once if record["event"] == "LoadMeasured")
    assert min(point["worst"] for point in grown.curve) == pytest.approx(worst)
    assert names == len(values(state_of(once)))


def test_a_cause_or_reason_never_becomes_a_label() -> None:
    found = records(1)
    for number in range(50):
        abort = {"event": "RebalanceAborted", "phase": f"phase {number}", "cause": f"cause {number}", "epoch": 1}
        found.append({**abort, "step": number, "time": 0.0, "committed_layers": [], "left_layers": []})
    names = [name for name in values(state(found)) if name.startswith("eplb_aborts")]
    assert len(names) == 2


def test_prometheus_reads_back_what_stands() -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    assert client is not None
    of = state()
    text, content_type = metrics.exposition(metrics_of(of, PROGRESS, 5000.0))
    assert content_type.startswith("text/plain")
    read = {
        f"{sample.name.removesuffix('_total')}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert read == values(of)


# -- Rank 0's server serves its page, to whom it should, and nothing else


TOKEN = "abcdefgh-01234567"


def shown(listen: int | str | None = 0, token: str | None = None, run: Path | None = None) -> Any:
    config = BalancerConfig(interval=5, replica_slots=1, listen=listen, listen_token=token, run=run)
    made, log = Observers(config, TOPOLOGY, start(), 4, lambda: Progress(17, 0.25, 1.0)), EventLog()
    made.listen_to(log)
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
    log.close()
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
    log.close()
    made.state.moved_experts["inside a rank"] = 5
    with caplog.at_level(logging.INFO):
        made.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rebalances"] == committed == 2 and summary["steps"] == 17 and summary["decisions"] == 3
    assert summary["moved_experts"] == sum(made.state.moved_experts.values()) - 5 > 0
    assert summary["imbalance"]["measured"] < summary["imbalance"]["start"]
    assert "2 rebalances in 15 measured steps;" in caplog.text

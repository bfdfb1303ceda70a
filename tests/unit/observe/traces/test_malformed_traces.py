"""Whatever a trace holds, reading it ends with an answer or with this room's own error in one line."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import cpu_events, gpu_events, of_rank

from eplb_runtime.observe.traces import TraceError, analyse

calm = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
with TemporaryDirectory() as _folder:
    WHOLE = of_rank(Path(_folder) / "a.json", 0, [*gpu_events(), *cpu_events()]).read_bytes()


def read(content: bytes, name: str = "trace.json") -> None:
    """Analysed; the only error is one line that names the file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            analyse(path)
        except TraceError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@calm
@given(st.binary(max_size=80))
def test_any_bytes(content: bytes) -> None:
    read(content)
    read(b"\x1f\x8b" + content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "broken off"),
        (b'{"traceEvents": [', "broken off"),
        (b'{"traceEvents": 5}', 'no "traceEvents"'),
        (b'{"a": 1}', 'no "traceEvents"'),
        (b"hello", "not a JSON trace"),
        (b"\xff\xfe{}", "not a JSON trace"),
        (b"[[]]", "an event is a list"),
        (b"[" * 100_000, "not a JSON trace"),
        (b'[{"ph":"X","ts":1e999,"cat":"kernel"}]', "ts is inf"),
        (b'[{"ph":"X","ts":1,"dur":-4,"cat":"kernel"}]', "times run forwards"),
        (b'[{"ph":"X","cat":"kernel"}]', "ts is 'missing'"),
        (b'[{"ph":"X","ts":' + b"9" * 5000 + b"}]", "not a JSON trace"),
    ],
)
def test_what_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(TraceError, match=says):
        analyse(tmp_path / "trace.json")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(TraceError, match="not a regular file"):
        analyse(tmp_path / "trace.json")

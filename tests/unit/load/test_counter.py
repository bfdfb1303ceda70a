"""Counting tokens per logical expert: what counts, what does not, and how history is kept."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from eplb_runtime.load import declared
from eplb_runtime.load.clock import ASSUMED_SHARE, ExpertClock, ExpertShare, SampledStep, StepClock, median_time
from eplb_runtime.load.counter import MAX_BUCKETS, LoadCounter, in_recompute, resume_load, saved_load
from eplb_runtime.load.declared import DeclaredLoadError, checked_declaration
from eplb_runtime.load.series import NAME, RecordedJob, read_series
from eplb_runtime.observe import recording as recorder_module
from eplb_runtime.observe.events_file import LineFile
from eplb_runtime.observe.recording import Recorder, Recording
from eplb_runtime.tools.formats.loads import read_load
from eplb_runtime.utils.files import FileError

CPU = torch.device("cpu")


def test_padding_does_not_count() -> None:
    counter = LoadCounter(1, 4, interval=4, device=CPU)
    ids = torch.tensor([[0, 1], [1, 3], [2, 3]])
    counter.count(0, ids, torch.tensor([True, False, True]))
    assert counter.counts.tolist() == [[1, 1, 1, 1]]
    assert ids.tolist() == [[0, 1], [1, 3], [2, 3]], "the router's choices were changed"


def test_every_step_is_a_row_and_taking_starts_anew() -> None:
    counter = LoadCounter(1, 2, interval=3, device=CPU)
    for step in range(3):
        counter.count(0, torch.tensor([[0]] * (step + 1)))
        counter.advance()
    assert counter.take().tolist() == [[[1, 0]], [[2, 0]], [[3, 0]]]
    assert counter.buckets == 0
    counter.count(0, torch.tensor([[1]]))
    counter.advance()
    assert counter.take().tolist() == [[[0, 1]]]
    for step in range(4):  # a full history that nobody takes is dropped
        counter.count(0, torch.tensor([[0]] * (step + 1)))
        counter.advance()
    assert counter.take().tolist() == [[[4, 0]]]


def test_long_intervals_add_up_several_steps_a_row() -> None:
    counter = LoadCounter(1, 2, interval=100, device=CPU)
    for _ in range(100):
        counter.count(0, torch.tensor([[0]]))
        counter.advance()
    rows = counter.take()
    assert len(rows) <= MAX_BUCKETS
    assert rows.sum().item() == 100
    assert rows[0].tolist() == [[counter.steps_per_bucket, 0]]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_repeated_forward_of_activation_checkpointing_is_known(use_reentrant: bool) -> None:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_recompute())
        return x.sin().exp()

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert not in_recompute()


def test_without_an_interval_all_steps_between_two_takes_are_one_row() -> None:
    counter = LoadCounter(1, 2, interval=None, device=CPU)
    assert counter.take().shape == (0, 1, 2)
    for steps in (3, 2 * MAX_BUCKETS + 1):
        for _ in range(steps):
            counter.count(0, torch.tensor([[0]]))
            counter.advance()
        assert (counter.buckets, counter.open_steps) == (1, steps)
        assert counter.take().tolist() == [[[steps, 0]]]
    assert counter.buckets == 0 and counter.take().shape == (0, 1, 2)


@pytest.mark.parametrize(("share", "longest"), [(1, 4), (0, 1)])
def test_a_saved_load_is_resumed_once_over_all_ranks(share: int, longest: int) -> None:
    """The newest of the history, and all that was counted since, which may be more."""
    counter, rows = LoadCounter(1, 2, interval=3, device=CPU), [np.array([[5, 6]]), np.array([[7, 8]])]
    for ids in ([[0, 1], [1, 1]], [[0, 0]]):
        counter.count(0, torch.tensor(ids))
        counter.advance()
    state = saved_load(rows, counter, lambda buckets: 2 * buckets.numpy())  # of two ranks
    history: Any = deque([np.zeros((1, 2), dtype=np.int64)], maxlen=longest)
    resume_load(state, history, resumed := LoadCounter(1, 2, interval=3, device=CPU), share)
    assert (resumed.open_steps, np.stack(history).tolist()) == (2, np.stack(rows[-longest:]).tolist())
    assert resumed.take().tolist() == [[[2 * share, 6 * share]], [[4 * share, 0]]]


# -- What is taken for a load that somebody declares, or plans for


def replayed(seed: int, tokens: int, layers: int, experts: int, top_k: int, padded: float) -> np.ndarray:
    """int64 ``[N, L, K]``: distinct experts of each token, -1 for padded tokens and dropped choices."""
    generator = np.random.default_rng(seed)
    ids = np.argsort(generator.random((tokens, layers, experts)), axis=2)[:, :, :top_k]
    ids[generator.random(tokens) < padded] = -1
    ids[generator.random(ids.shape) < padded / 4] = -1
    return ids


def counted(ids: np.ndarray, experts: int) -> np.ndarray:
    """float64 ``[L, E]``, token by token."""
    load = np.zeros((ids.shape[1], experts))
    for token in ids:
        for layer, choices in enumerate(token):
            for expert in choices[choices >= 0]:
                load[layer, expert] += 1
    return load


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 30),
    layers=st.integers(1, 3),
    experts=st.integers(3, 9),
    top_k=st.integers(1, 2),
    padded=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64]),
    chunk=st.sampled_from([1, 7, 1 << 22]),
)
def test_the_experts_of_tokens_count_as_their_load_whatever_is_padding(
    seed: int, tokens: int, layers: int, experts: int, top_k: int, padded: float, dtype: type, chunk: int
) -> None:
    ids = replayed(seed, tokens, layers, experts, top_k, padded).astype(dtype)
    wanted = counted(ids, experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declared, "_CHUNK_IDS", chunk)
        for given_ids in (ids, torch.from_numpy(ids)):
            assert (checked_declaration(given_ids, layers, experts) == wanted[None]).all()
        parts = [torch.from_numpy(part) for part in np.array_split(ids, 3)]
        found = checked_declaration(parts, layers, experts)
    assert (found == np.stack([counted(part.numpy(), experts) for part in parts])).all()
    if wanted.any():
        assert (checked_declaration(wanted, layers, experts) == wanted[None]).all()


WRONG: list[tuple[Any, str]] = [
    (torch.tensor([[[0, 4], [0, 1]]]), "an id 4: give logical ids from 0 to 3"),
    (torch.tensor([[[0, -2], [0, 1]]]), "an id -2"),
    (torch.ones(5, 2, 3), "give [2, 4]"),
    (torch.ones(5, 3, 2, dtype=torch.int64), "give [2, 4]"),
    ([torch.ones(2, 4), torch.ones(2, 3)], "the declared load has shape (2, 3)"),
    ([np.zeros((2, 4)), np.zeros((2, 4))], "not all 0"),
    ([np.ones((2, 4)), -np.ones((2, 4))], "is -1.0, negative: give token counts"),
]


@pytest.mark.parametrize(("load", "said"), WRONG)
def test_what_is_neither_a_load_nor_experts_of_tokens_is_refused_in_a_line(load: Any, said: str) -> None:
    with pytest.raises(DeclaredLoadError) as refused:
        checked_declaration(load, 2, 4)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_token_may_choose_an_expert_twice() -> None:
    assert checked_declaration(torch.tensor([[[1, 1], [3, 0]]]), 2, 4).tolist() == [[[0, 2, 0, 0], [1, 0, 0, 1]]]


# -- A recorded series survives what befalls a run: crashes, restarts, other people's files


LAYERS, EXPERTS = 2, 3


def windows(first: int, count: int) -> NDArray[np.int64]:
    return first + np.arange(count * LAYERS * EXPERTS, dtype=np.int64).reshape(count, LAYERS, EXPERTS)


def written(run: Path, *parts: NDArray[np.int64], steps: int = 1) -> None:
    writer = Recorder(run, LAYERS, EXPERTS)
    for part in parts:
        writer.write(part, steps)
    writer.close()


def test_what_is_appended_is_read_in_its_order_over_restarts(tmp_path: Path) -> None:
    written(tmp_path, windows(0, 2), windows(100, 1), steps=5)
    written(tmp_path, windows(200, 3))
    load, steps, _ = read_series(tmp_path)
    assert np.array_equal(load, np.concatenate([windows(0, 2), windows(100, 1), windows(200, 3)]))
    assert steps == [5, 5, 5, 1, 1, 1]
    assert np.array_equal(read_load(tmp_path), load)


def test_a_bit_that_flips_is_noticed(tmp_path: Path) -> None:
    written(tmp_path, windows(0, 1), windows(100, 1))
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    line = json.loads(lines[1])
    line["data"] = line["data"][:20] + ("A" if line["data"][20] != "A" else "B") + line["data"][21:]
    path.write_bytes(lines[0] + json.dumps(line).encode() + b"\n" + lines[2])
    with pytest.raises(FileError, match=r"load.jsonl, line 2: .*(cannot be read|another size)"):
        read_load(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"format": "something else"}', "line 1: no recorded load"),
        ('{"format": "eplb-runtime-load", "version": 1, "layers": 100000, "experts": 100000}', "no recorded load"),
        ("[" * 100_000, "no load has been recorded"),
        ("no JSON", "no load has been recorded"),
    ],
)
def test_other_files_are_refused_in_one_line(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(line[:4000] + "\n")
    with pytest.raises(FileError, match=said):
        read_load(tmp_path)


def test_a_folder_of_an_earlier_release_says_how_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "load").mkdir()
    with pytest.raises(FileError, match=r"awk 1 load/\*.jsonl > load.jsonl"):
        read_load(tmp_path)


def test_a_run_of_another_model_is_not_mixed_in(tmp_path: Path) -> None:
    written(tmp_path, windows(0, 1))
    with pytest.raises(FileError, match="holds the load of 2 layers of 3 experts, not 2 of 4; or name another folder"):
        Recorder(tmp_path, LAYERS, EXPERTS + 1)


def test_a_full_disk_ends_the_recording_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: LineFile, line: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path, LAYERS, EXPERTS)
    monkeypatch.setattr(LineFile, "write", full)
    for number in range(5):
        recorder.write(windows(number, 1), 1)
    recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: load is not recorded any more: [Errno 28] No space left on device"
    ]


def test_a_disk_that_hangs_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, settings = threading.Event(), {"group": None, "real_tokens": lambda _: None, "in_training_only": False}
    monkeypatch.setattr(recorder_module, "CLOSING_SECONDS", 0.0)
    settings |= {"interval": 1, "device": torch.device("cpu"), "recorder": Recorder(tmp_path, LAYERS, EXPERTS)}
    recording = Recording(torch.nn.Module(), [lambda *_: lambda: None] * LAYERS, EXPERTS, **settings)
    monkeypatch.setattr(LineFile, "write", lambda *_: free.wait())
    for _ in range(recorder_module.MOST_WAITING + 3):
        recording.step()
    recording.close()
    free.set()
    assert any("the disk is too slow" in record.getMessage() for record in caplog.records)


def test_what_is_known_of_the_job_grows_from_line_to_line(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, LAYERS, EXPERTS, RecordedJob(ranks=2, interval=5))
    for seconds, hidden_size in ((9.0, 0), (0.5, 64), (0.25, 64)):
        writer.write(windows(0, 1), 1, RecordedJob(step_seconds=seconds, hidden_size=hidden_size))
    writer.close()
    assert read_series(tmp_path)[2] == RecordedJob(ranks=2, interval=5, hidden_size=64, step_seconds=0.5)
    assert len(read_series(tmp_path)[0]) == 3


def test_the_newest_start_with_windows_says_what_the_job_is(tmp_path: Path) -> None:
    for ranks, count in ((2, 1), (4, 1), (8, 0)):
        writer = Recorder(tmp_path, LAYERS, EXPERTS, RecordedJob(ranks=ranks))
        if count:
            writer.write(windows(0, count), 1)
        writer.close()
    assert read_series(tmp_path)[2].ranks == 4


# -- The share of a step in expert work: what marks of a step add up to, and what the gate makes of it


class FakeClock(ExpertClock):
    """Time passes when it is told to."""

    now = 0.0

    def mark(self) -> float:
        return self.now


def run_layer(clock: FakeClock, seconds: float) -> None:
    begin = clock.mark() if clock.on else None
    clock.now += seconds
    if begin is not None:
        clock.forward_ends(begin)


def step_of(expert_seconds: float, step_seconds: float) -> SampledStep:
    return SampledStep(0.0, step_seconds, [(0.0, expert_seconds)])


def test_a_step_adds_up_forwards_and_backwards() -> None:
    clock = FakeClock()
    clock.begin_step()
    run_layer(clock, 2.0)
    clock.now += 5.0
    metadata = object()
    clock.backward_begins(metadata)
    clock.now += 3.0
    clock.backward_ends(metadata)
    clock.end_step()
    (step,) = clock.take()
    assert step.time() == (10.0, 5.0)
    assert clock.take() == (), "taken once"


def test_a_backward_pass_that_does_not_end_is_left_out() -> None:
    clock, metadata = FakeClock(), object()
    for ends in (False, True):
        clock.begin_step()
        clock.backward_ends(metadata)  # of the step before: too late
        run_layer(clock, 2.0)
        metadata = object()
        clock.backward_begins(metadata)
        clock.now += 4.0
        if ends:
            clock.backward_ends(metadata)
        clock.end_step()
    assert [step.time()[1] for step in clock.take()] == [2.0, 6.0]  # type: ignore[index]


def test_an_odd_step_does_not_count() -> None:
    """A checkpoint was written in the last one; and the sum of all would be another share."""
    steps = [step_of(4.0, 10.0), step_of(3.0, 10.0), step_of(4.0, 100.0)]
    assert median_time(steps) == (10.0, 3.0)
    assert median_time([]) is None and median_time([step_of(0.0, 0.0)]) is None


class Event:
    """An event that a device reaches when it is told to."""

    def __init__(self, seconds: float, reached: bool = True) -> None:
        self.seconds, self.reached = seconds, reached

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.reached and end.reached, "it would raise"
        return 1e3 * (end.seconds - self.seconds)

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for the device")


def test_a_step_that_the_device_has_not_reached_is_not_read() -> None:
    begin, end, late = Event(0.0), Event(6.0), Event(6.0, reached=False)

    def step(end: Any, *span: Any) -> SampledStep:
        return SampledStep(begin, end, [span])  # type: ignore[arg-type, list-item]

    assert step(end, Event(1.0), Event(4.0)).time() == (6.0, 3.0)
    assert step(late, Event(1.0), Event(4.0)).time() is None
    assert step(end, Event(1.0), late).time() is None and median_time([step(end, Event(1.0), late)]) is None


def test_the_share_is_assumed_until_it_is_measured_and_a_given_one_stays() -> None:
    share = ExpertShare.before_measuring(None)
    assert share == ExpertShare(ASSUMED_SHARE, "assumed")
    assert share.updated(0.0, 0.0) is share, "nothing was measured"
    assert share.updated(3.0, 8.0) == ExpertShare(0.375, "measured")
    assert share.updated(3.0, 8.0).updated(0.0, 0.0) == ExpertShare(0.375, "measured"), "the last one stays"
    given = ExpertShare.before_measuring(0.2)
    assert given.updated(3.0, 8.0) == ExpertShare(0.2, "given")


def test_a_plan_saves_the_share_times_what_imbalance_falls_by() -> None:
    """Of a step of 10 s, 4 s are expert work at an imbalance of 2: with 1.5 it is 3 s, with an even load 2 s."""
    even = ExpertShare(0.4, "measured").even(2.0)
    assert 10.0 * even * (2.0 - 1.5) == pytest.approx(10.0 * 0.4 * (1 - 1.5 / 2.0)) == pytest.approx(1.0)
    assert ExpertShare(0.4, "measured").even(0.0) == 0.4, "no load: as it is"


def test_a_share_of_before_a_rebalance_is_brought_to_the_imbalance_of_now() -> None:
    """8 of 10 s at imbalance 4, so 2 s with even load; at 2 a step takes 2 + 4 s, and at 4 again 10 s."""
    share = ExpertShare(0.8, "measured").measured_at(4.0)
    assert share.even(2.0) == pytest.approx(2.0 / 6.0) and share.even(4.0) == pytest.approx(0.2)
    assert ExpertShare(0.8, "given").measured_at(4.0).even(2.0) == pytest.approx(0.4), "a given one is that of now"
    assert share.updated(3.0, 6.0).at == 0.0, "a new measurement has another imbalance"


# -- How long a step takes, where rollouts lie between steps and where not


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only entry."""
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    return clock


def two_rounds(now: list[float], begins: bool) -> list[float]:
    """A rollout of 50 s and a pause of 7 s lie before each step of 2 s with two micro-batches."""
    clock, seconds = StepClock(0.0), []
    for _ in range(3):
        now[0] += 50.0
        clock.exclude(7.0)
        now[0] += 7.0
        for _ in range(2):
            if begins:
                clock.begin()
            now[0] += 1.0
        clock.tick()
        seconds.append(clock.step_seconds)
    return seconds


def test_a_step_begins_with_its_first_forward_where_rollouts_lie_between_steps(now: list[float]) -> None:
    assert two_rounds(now, begins=True) == pytest.approx([0.0, 2.0, 2.0])
    assert two_rounds(now, begins=False) == pytest.approx([0.0, 52.0, 52.0]), "control"


def test_pauses_inside_a_step_that_has_begun_are_left_out(now: list[float]) -> None:
    clock = StepClock(0.0)
    clock.tick()
    now[0] += 9.0
    clock.begin()
    now[0] += 3.0
    clock.exclude(1.0)
    clock.tick()
    assert clock.step_seconds == pytest.approx(2.0)

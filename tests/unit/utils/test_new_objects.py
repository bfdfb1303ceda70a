"""What is new is found without reading what is old, whatever the collector does meanwhile."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from eplb_runtime.utils.new_objects import NewObjects

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="the collector keeps no young objects apart")


class Wanted:
    """What is looked for."""


def pick(objects: Sequence[Any]) -> list[Wanted]:
    return [one for one in objects if type(one) is Wanted]


@pytest.fixture
def new() -> Iterator[NewObjects]:
    gc.collect()
    listening = NewObjects(pick)
    listening.restart()
    yield listening
    listening.close()


@pytest.mark.parametrize("generations", [(), (0,), (1,), (2,), (0, 1), (1, 1), (2, 0, 2)])
def test_objects_are_found_after_collections_that_make_them_old(new: NewObjects, generations: tuple[int, ...]) -> None:
    made = [Wanted()]
    for generation in generations:
        gc.collect(generation)
    made.append(Wanted())
    found = new.found()
    assert found is not None and set(map(id, made)) <= set(map(id, found))


def test_control_without_being_told_of_collections_they_are_missed(new: NewObjects) -> None:
    new._note_young = lambda: None  # type: ignore[method-assign]
    made = Wanted()
    gc.collect()
    assert made not in (new.found() or [])


def test_what_was_old_is_not_found_and_what_is_gone_neither(new: NewObjects) -> None:
    old, passing = Wanted(), Wanted()
    gc.collect()
    gone = weakref.ref(passing)
    del passing
    assert gone() is None
    new.restart()
    gc.collect()
    assert new.found() == []
    assert old is not None


def test_what_the_collector_does_not_tell_of_is_not_known(new: NewObjects) -> None:
    assert new.found() == []
    gc.callbacks.remove(new._callback)
    assert new.found() is None
    new.close()
    assert new.found() is None


def test_frozen_objects_make_it_unknown(new: NewObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    count = gc.get_freeze_count()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count + 1)
    assert new.found() is None


def test_who_is_let_go_listens_no_more() -> None:
    before = list(gc.callbacks)
    listening = NewObjects(pick)
    listening.restart()
    assert len(gc.callbacks) == len(before) + 1
    del listening
    gc.collect()
    assert gc.callbacks == before

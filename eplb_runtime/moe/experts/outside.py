"""Finds tensors of the user's own whose rows are experts: averages, snapshots, masks, kept beside the model.

They are read by index, and would be of other experts once these have moved; nothing that torch counts tells of a read.
So before homes move the heap is searched for what has an expert parameter's shape and is neither the model's, the
optimizer's, registered, nor ours. Values tell what is a copy (an average stays near its weights), in whatever shape,
from what has that shape or length by chance; of what is no copy (a mask, sums of squares) that it, or one of its shape
in the same container, lives on from look to look. Numbers of experts in plain lists, bytes or files are not found.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from types import CellType, FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ...utils.new_objects import NewObjects
from .matching import MARK, arrays_in
from .slices import is_sliced

logger = logging.getLogger("eplb_runtime")

_SAMPLED = 64
"""Elements of a tensor that are compared first."""
_SAMPLED_AGAIN = 4096
"""Elements that must agree, too: of some ten thousand pairs of unrelated tensors, one passes with 64."""
_ALIKE = 0.5
"""The cosine between elements from which on one tensor is a copy of another, perhaps an old one."""
_CLIMBS = 4
"""Containers inside containers that are looked through for who holds a tensor."""
_FEW = 64
"""Containers of more entries are looked through only if their first is an array."""
_MOST = 64
"""Tensors whose holders are asked for."""
_HELD_HERE = 3
"""References to a running function's dict of variables: of the function, and of who asks and counts them."""
_MADE_IN_PYTHON = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE`` of a type: its objects have attributes."""
_CONTAINERS = (list, tuple, dict, set, OrderedDict, defaultdict, deque, CellType)
_NOT_THE_USERS = ("eplb_runtime", "torch.distributed.", "torch._", "torch.optim.optimizer")

BESIDE = "another attached model without an optimizer is written by the loop"
AGAIN = "tensors as large as experts were there for the first time, which may be passing: asked again next time"

Array = Tensor | NDArray[Any]
_ALL: weakref.WeakSet[Outside] = weakref.WeakSet()
"""Of all attached models of this process."""


class Outside:
    """What of the user's goes by row, of one model on one rank.

    Args:
        parameters: this rank's experts ``[E/R, ...]`` by name; sliced ones are passed over.
        models: whose parameters these are.
        known: what moves along, or need not: more than parameters and gradients of the models.
        is_trained: whether an optimizer of ours steps the models.
        epoch: changes with each change of their placement.
        follows: whether homes may move in steps that follow each other. What is new is followed then from one look to
            the next, so that looks for copies alone (`found`) take no tenths of a second of each such step.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        models: Sequence[nn.Module],
        known: Callable[[], Iterable[Tensor]],
        *,
        is_trained: Callable[[], bool] = lambda: True,
        epoch: Callable[[], int] = lambda: 0,
        follows: bool = False,
    ) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.ndim > 1 and not is_sliced(p)}
        self._models = list(models)
        self._known = known
        self._is_trained, self._epoch = is_trained, epoch
        self._stood = self._state()
        self._looked_at_before = self._is_written = False
        _ALL.add(self)
        self._buffers = {id(one): weakref.ref(one) for model in models for one in nn.Module.buffers(model)}
        self._left_alone: dict[int, weakref.ref[Any]] = {}
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._seen_in: set[tuple[tuple[int, ...], int]] = set()
        self._said = ""
        self._holding: list[weakref.ref[Any]] = []
        self._sizes: set[int] = set()
        self._shapes: set[tuple[int, ...]] = set()
        self._new = NewObjects(self._wanted) if follows else None
        self._frozen = gc.get_freeze_count()

    def close(self) -> None:
        """Follow nothing any more."""
        if self._new is not None:
            self._new.close()

    def skip(self, arrays: Iterable[Array]) -> None:
        """These do not go by row, whatever their shape."""
        self._left_alone.update((id(array), weakref.ref(array)) for array in arrays)
        self._said = ""

    def found(self, *, patient: bool = True, copies_only: bool = False) -> str:
        """Who holds what, in words; empty: nothing was found; `AGAIN`: what may be passing was there for the first
        time, where there is a next time (``patient``). Reads the heap, for some tenths of a second: whoever asks is
        about to move homes, which costs more, and is rarer than steps.

        Args:
            copies_only: what is no copy is not asked for: the last look was a step ago, and it may be passing still.
                Where what is new is followed, the heap is read if something new has the size of experts; an array of
                NumPy in a container that was there before is found by the next look for all alone.
        """
        if self._said and any(reference() is not None for reference in self._holding):
            return self._said
        rows, waits = self._rows_of_users(copies_only)
        beside, wait = self._models_written()
        waits |= wait
        if beside:
            self._holding = [weakref.ref(one) for one in beside]
            self._said = f"{BESIDE} (its {next(iter(beside[0]._parameters))})"
            return self._said
        self._holding = [weakref.ref(one) for one, _ in rows]
        self._said = ""
        if not rows:
            return AGAIN if waits and patient else ""
        first, (path, holder, _) = rows[0]
        holder = _name(first, path, holder)
        what, like = "arrays" if isinstance(first, np.ndarray) else "tensors", self._like(first)
        said = f"{holder} holds {len(rows)} {what} as large as experts, one of shape {list(first.shape)}"
        self._said = f"{said} as {like}" if like else said
        return self._said

    def _models_written(self) -> tuple[list[Outside], bool]:
        """Find other attached models that the user writes; whether some may have been written once only."""
        others = [one for one in _ALL if self._may_be_averaged_in(one)]
        waits = [one._sample_writes() for one in others]
        written = [weakref.ref(one) for one in others if one._is_written]
        del others
        if written:
            gc.collect()  # a model that was let go of is in cycles with what balanced it
        return [one for one in (reference() for reference in written) if one is not None], any(waits)

    def _rows_of_users(self, copies_only: bool) -> tuple[list[tuple[Array, tuple[set[int], str, bool]]], bool]:
        """What goes by row, and who holds it; whether there is more that was not there before, and may be passing."""
        strangers = [] if copies_only and self._nothing_is_new() else self._strangers()
        copies = [one for one, _ in strangers if self._like(one)]
        # A batch may have the shape of a matrix by chance, and moments may be those of an optimizer that was let go.
        others = [one for one, may_be in strangers if not may_be and not copies_only]
        tell = [one for one in others if self._may_be_state(tuple(one.shape))]
        asked = [weakref.ref(one) for one in {id(one): one for one in (*copies, *tell)}.values()]
        sure, stay = {id(one) for one in copies}, {id(one) for one in tell if _is_among(one, self._seen)}
        if not copies_only:
            self._seen = {id(one): weakref.ref(one) for one in tell}
        told = {id(one) for one in tell}
        del strangers, copies, others, tell
        if sure or stay or (told and self._seen_in):
            gc.collect()  # what is garbage already is still in the heap
        alive = [one for one in (reference() for reference in asked) if one is not None][:_MOST]
        holders = _holders(alive) if alive else []
        self.skip(one for one, holder in zip(alive, holders, strict=True) if holder is None)
        users = [(one, holder) for one, holder in zip(alive, holders, strict=True) if holder is not None]
        # An average that is written out of place is another tensor in each step, and stays where it was (in a dict).
        places = {id(one): {(tuple(one.shape), place) for place in by[0]} for one, by in users if id(one) in told}
        stay |= {one for one, those in places.items() if those & self._seen_in}
        if not copies_only:
            self._seen_in = {place for one, those in places.items() for place in those if place[1] != one}
        rows = [(one, by) for one, by in users if id(one) in sure or (id(one) in stay and not by[2])]
        return rows, any(not by[2] and id(one) not in sure | stay for one, by in users)

    def _state(self) -> tuple[int, list[int]]:
        """The placement, and how often each parameter was written; both grow where experts move."""
        return self._epoch(), [0 if one.is_inference() else one._version for one in self._parameters.values()]

    def _may_be_averaged_in(self, other: Outside) -> bool:
        """Whether another attached model has experts as large as these, of which the user has said nothing."""
        shapes = {parameter.shape for parameter in self._parameters.values()}
        fit = [parameter for parameter in other._parameters.values() if parameter.shape in shapes]
        return other is not self and not all(_is_among(parameter, self._left_alone) for parameter in fit)

    def _sample_writes(self) -> bool:
        """Find out whether the user writes these, who has no optimizer for them; whether that may be once only, to
        begin with."""
        (epoch, before), now = self._stood, self._state()
        times = max((new - old for new, old in zip(now[1], before, strict=True)), default=0)
        again, self._looked_at_before, self._stood = self._looked_at_before, True, now
        if epoch != now[0] or self._is_trained() or not times:
            return False
        self._is_written = self._is_written or again or times > 1
        return not self._is_written

    # -- finding -------------------------------------------------------------------------------------------------------

    def _strangers(self) -> list[tuple[Array, bool]]:
        """All that has the size of experts, or goes with them in products, and is not known; whether it may be there
        for another reason: the state of an optimizer, a buffer that the model had."""
        if not self._parameters:
            return []
        self._sizes = {*self.layouts(), *(p.numel() for p in self._parameters.values())}
        self._shapes = {*self._shapes_of_rows(), *self._shapes_of_masks()}
        self._tell_of_frozen()
        if self._new is not None:
            self._new.restart()
        heap = gc.get_objects()
        types = set(map(type, heap))
        kinds = _kinds_of_holders(types) | {Tensor, nn.Parameter}
        of_modules = {kind for kind in types if issubclass(kind, nn.Module)}
        of_optimizers = {kind for kind in types if issubclass(kind, torch.optim.Optimizer)}
        picked = [one for one in heap if type(one) in kinds]
        del heap
        wanted = self._wanted([*picked, *_values_in_frames()])
        ours = list(_ALL)
        modules = [one for one in picked if type(one) in of_modules]
        optimizers = [one for one in picked if type(one) in of_optimizers]
        del picked
        if not wanted:
            return []
        known = {place for one in ours for place in one._places()}
        # Half-made ones, whose constructors have raised, lack anything.
        moments = {id(value) for one in optimizers for value in arrays_in(getattr(one, "state", {}))}
        in_modules = {
            id(p) for one in modules for kept in ("_parameters", "_buffers") for p in getattr(one, kept, {}).values()
        }
        rows = self._shapes_of_rows()
        return [
            (one, id(one) in moments or any(_is_among(one, other._buffers) for other in ours))
            for one in wanted
            if _has_memory(one)
            and _place(one) not in known
            and not _is_among(one, self._left_alone)
            and not (tuple(one.shape) in rows and id(one) in in_modules)
        ]

    def _wanted(self, objects: Sequence[Any]) -> list[Array]:
        """Of these, or held by one of them, what has the size of experts or goes with them in products."""
        found: list[Array] = [one for one in objects if type(one) in (Tensor, nn.Parameter, np.ndarray)]
        found += _arrays_held_by(
            [one for one in objects if (type(one) is not dict and type(one) is not list) or _may_hold_arrays(one)]
        )
        return [
            one
            for one in {id(one): one for one in found}.values()
            if (one.size if isinstance(one, np.ndarray) else one.numel()) in self._sizes
            or tuple(one.shape) in self._shapes
        ]

    def _nothing_is_new(self) -> bool:
        """Look through what came to be since the heap was read; whether no copy of experts is among it."""
        new = self._new.found() if self._new is not None else None
        if new is None:
            return False
        known = {place for one in list(_ALL) for place in one._places()}
        found = {id(one): one for one in (*new, *self._wanted(_values_in_frames()))}.values()
        unknown = [one for one in found if _has_memory(one) and _place(one) not in known]
        return not any(self._like(one) for one in unknown if not _is_among(one, self._left_alone))

    def _tell_of_frozen(self) -> None:
        """Warn, once for each time, of objects that are in no generation any more, where nobody finds them."""
        frozen, self._frozen = self._frozen, gc.get_freeze_count()
        if self._frozen > frozen:
            logger.warning(
                "gc.freeze() hides %d objects: tensors of experts that you keep (averages, snapshots) are not found "
                "among them, and would be of other experts once these move: say so with balancer.register",
                self._frozen - frozen,
            )

    def _places(self) -> Iterator[int]:
        """Of all memory that is known. A buffer of the model does not move with experts, whoever has put it there."""
        own = [parameter for model in self._models for parameter in nn.Module.parameters(model)]
        for tensor in (*own, *(p.grad for p in own if p.grad is not None), *self._known()):
            yield _place(tensor)

    def layouts(self) -> dict[int, list[list[Tensor]]]:
        """Ways in which parameters may lie one after the other in one tensor, by its length: all of a model, those of
        experts, of a layer's experts, and those of one shape."""
        experts = self._parameters
        groups: dict[object, list[Tensor]] = {}
        for name, parameter in experts.items():
            groups.setdefault(name.rpartition(".")[0], []).append(parameter)
            groups.setdefault(parameter.shape, []).append(parameter)
        ways = [list(experts.values()), *groups.values()]
        for model in self._models:
            every: list[Tensor] = list(model.parameters())
            ways += [every, [p for p in every if p.requires_grad]]
        found: dict[int, list[list[Tensor]]] = {}
        for way in ways:
            found.setdefault(sum(p.numel() for p in way), []).append(way)
        return found

    def _shapes_of_rows(self) -> set[tuple[int, ...]]:
        """Shapes of one expert, where these say something."""
        return {tuple(parameter.shape[1:]) for parameter in self._parameters.values() if parameter.ndim > 2}

    def _shapes_of_masks(self) -> set[tuple[int, ...]]:
        """Shapes of what has a number for each expert, or for its rows or columns, in products with all of them."""
        return {
            (len(p), *trailing)
            for p in self._parameters.values()
            if p.ndim > 2 and len(p) > 1
            for trailing in product(*((1, length) for length in p.shape[1:]))
        }

    def _may_be_state(self, shape: tuple[int, ...]) -> bool:
        """Whether what has this shape is kept for experts if it is there for long."""
        if len(shape) == 1:
            # A vector of a model may be as long as the biases of some experts; as long as their matrices it is rarely.
            experts = {id(p) for p in self._parameters.values() if p.ndim > 2}
            ways = self.layouts().get(shape[0], [])
            long = any(id(p) in experts for way in ways for p in way)
            return long or any(shape[0] == p.numel() for p in self._parameters.values() if p.ndim > 2)
        as_experts = {tuple(parameter.shape) for parameter in self._parameters.values() if parameter.ndim > 2}
        return shape not in self._shapes_of_rows() and shape in as_experts | self._shapes_of_masks()

    def _like(self, one: Array) -> str:
        """The expert parameter that it is a copy of, or begins with one of."""
        tensor = torch.from_numpy(one) if isinstance(one, np.ndarray) else one.detach()
        if not tensor.is_floating_point():
            return ""
        for name, parameter in self._parameters.items():
            if _alike(tensor, list(_views_like(tensor, parameter.detach()))):
                return name
        flat, names = tensor.reshape(-1), {id(parameter): name for name, parameter in self._parameters.items()}
        for layout in self.layouts().get(len(flat), ()):
            alike: list[str] = []
            filled = 0
            for parameter, part in zip(layout, flat.split([p.numel() for p in layout]), strict=True):
                if id(parameter) in names and parameter.any():
                    filled += 1
                    alike += [names[id(parameter)]] if _alike(part, [parameter]) else []
            if len(alike) * 2 > filled:  # all experts of one layer are as long as this rank's of several
                return alike[0]
        return ""


def _views_like(tensor: Tensor, parameter: Tensor) -> Iterator[Tensor]:
    """Of a parameter, as the tensor would be if it was a copy of all, or of one expert."""
    if tensor.shape == parameter.shape:
        yield parameter
    elif parameter.ndim > 2 and tensor.numel() == parameter.numel():
        yield from (parameter, parameter.mT)
    else:
        yield from (row for row in parameter.unbind() if row.shape == tensor.shape)


def holder_of(tensors: Sequence[Tensor]) -> str:
    """What to call whoever holds one of these, if that is the user's; empty: nobody does. Reads the heap."""
    for one, holder in zip(tensors, _holders(list(tensors)), strict=True):
        if holder is not None:
            return _name(one, holder[0], holder[1])
    return ""


def whole_average(experts: Iterable[Tensor], num_experts: int) -> str:
    """What to call an `AveragedModel` that has all experts of parameters of which a rank has some; empty: there is
    none. Reads the heap."""
    shapes = {(num_experts, *one.shape[1:]) for one in experts if len(one) != num_experts}
    for one in [one for one in gc.get_objects() if type(one) is AveragedModel]:
        if any(tuple(parameter.shape) in shapes for parameter in one.parameters()):
            return next((name for name, value in _variables() if value is one), "an object")
    return ""


def _kinds_of_holders(types: Iterable[type]) -> set[type]:
    """Types of what may hold arrays of NumPy: lists, dicts, and objects of classes that are written in Python."""
    classes = {kind for kind in types if kind.__flags__ & _MADE_IN_PYTHON and not issubclass(kind, (type, Tensor))}
    return classes | {dict, list}


def _arrays_held_by(holders: Sequence[Any]) -> list[Array]:
    """Arrays of NumPy in containers and objects, and in what these hold that the collector does not know."""
    held = gc.get_referents(*holders)
    held += gc.get_referents(*_untracked(held))
    return [one for one in held if type(one) is np.ndarray]


def _untracked(objects: Sequence[Any]) -> list[Any]:
    """Dicts and tuples of these that may hold arrays and are not in the heap: the collector leaves out those in which
    nothing can hold another object."""
    found = [one for one in objects if type(one) is dict or type(one) is tuple]
    return [one for one in found if one and not gc.is_tracked(one) and _may_hold_arrays(one)]


def _may_hold_arrays(container: Any) -> bool:
    if len(container) <= _FEW:
        return True
    first = next(iter(container.values() if type(container) is dict else container), None)
    return type(first) is np.ndarray


def _has_memory(one: Array) -> bool:
    return not (isinstance(one, Tensor) and (one.is_meta or not one.untyped_storage().size()))


def _place(one: Array) -> int:
    if isinstance(one, np.ndarray):
        base = one
        while isinstance(base.base, np.ndarray):
            base = base.base
        return int(base.__array_interface__["data"][0])
    return one.untyped_storage().data_ptr() if not is_sliced(one) else 0


def _is_among(one: Any, references: Mapping[int, weakref.ref[Any]]) -> bool:
    reference = references.get(id(one))
    return reference is not None and reference() is one


def _alike(one: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether the elements of a tensor go with those of one of the others."""
    same = [other for other in others if other.numel() == one.numel()]
    if not same:
        return False
    for sampled in (_SAMPLED, _SAMPLED_AGAIN):
        mine, theirs = _elements(one, sampled), torch.stack([_elements(other, sampled) for other in same])
        sizes = mine.norm() * theirs.norm(dim=1)
        alike = (theirs @ mine > _ALIKE * sizes).logical_and(sizes > 0).tolist()
        same = [other for other, is_alike in zip(same, alike, strict=True) if is_alike]
        if not same:
            return False
    return True


def _elements(tensor: Tensor, most: int) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // most)][:most].to("cpu", torch.float64)


# -- naming ------------------------------------------------------------------------------------------------------------


def _frames() -> Iterator[FrameType]:
    """Of the user's functions that are running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        where = str(frame.f_globals.get("__name__", ""))
        if not where.startswith(("eplb_runtime", "torch.")):
            yield frame
        frame = frame.f_back


def _locals(frame: FrameType) -> list[tuple[str, Any]]:
    """Names and values of its variables. A running function keeps the dict of them that is made here, and with it what
    they refer to: it is emptied, unless somebody has it from ``locals()``."""
    variables = frame.f_locals
    found = list(variables.items())
    is_copy = type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(variables) <= _HELD_HERE:
        variables.clear()
    return found


def _values_in_frames() -> list[Any]:
    """Of local variables; the collector knows none of a function that is running."""
    return [value for frame in _frames() for _, value in _locals(frame)]


def _variables() -> Iterator[tuple[str, Any]]:
    """Their local variables and the globals of their modules, by what to call them."""
    modules: set[int] = set()
    for frame in _frames():
        yield from ((f"{name} in {frame.f_code.co_name}()", value) for name, value in _locals(frame))
        if id(frame.f_globals) not in modules:
            modules.add(id(frame.f_globals))
            where = frame.f_globals.get("__name__", "")
            yield from ((f"{name} of module {where}", value) for name, value in list(frame.f_globals.items()))


def _is_in(one: Array, thing: Any) -> bool:
    things = (thing,)
    if isinstance(thing, list | tuple | dict) and len(thing) <= _FEW:
        things = tuple(thing.values() if isinstance(thing, dict) else thing)
    modules = [part for part in things if isinstance(part, nn.Module)]
    return any(one is tensor for part in modules for tensor in arrays_in(part))


def _holders(arrays: list[Array]) -> list[tuple[set[int], str, bool] | None]:
    """What leads to each, the object that holds it, if any, and whether it is in a state dict that says where experts
    stood, and is loaded nowhere else; None: we hold it, or torch's own machinery. Climbs
    from container to container, all at once."""
    said: list[str] = ["" for _ in arrays]
    ours: set[int] = set()
    marked: set[int] = set()
    above: list[set[int]] = [{id(one)} for one in arrays]  # what leads to each
    level, of_level = list(arrays), {id(one): {number} for number, one in enumerate(arrays)}
    for container, numbers in _untracked_with(arrays, of_level):
        level.append(container)
        of_level[id(container)] = numbers
        for number in numbers:
            above[number].add(id(container))
    for _ in range(_CLIMBS):
        found: dict[int, set[int]] = {}
        next_level: list[Any] = []
        for holder in gc.get_referrers(*level):
            kind = type(holder)
            if holder is level or holder is arrays or holder is next_level or kind is FrameType:
                continue
            numbers = {n for child in gc.get_referents(holder) for n in of_level.get(id(child), ())}
            if kind in _CONTAINERS:
                if isinstance(holder, dict) and any(type(key) is str and key.endswith(MARK) for key in holder):
                    marked |= numbers
                if kind is not dict or "__builtins__" not in holder:  # variables of modules are asked for by name
                    fresh = {number for number in numbers if id(holder) not in above[number]}
                    if fresh:
                        found[id(holder)] = fresh
                        next_level.append(holder)
            elif f"{kind.__module__}.".startswith(_NOT_THE_USERS):
                ours |= numbers
            elif kind.__module__ != "builtins" and not isinstance(holder, type):
                for number in numbers:
                    said[number] = said[number] or f"a {kind.__name__}"
                    above[number].add(id(holder))
        for place, numbers in found.items():
            for number in numbers:
                above[number].add(place)
        level, of_level = next_level, found
        if not level:
            break
    # Nothing of Python's holds what is passing through torch.
    in_frames = {id(value) for value in _values_in_frames()}
    held = [len(path) > 1 or id(one) in in_frames for one, path in zip(arrays, above, strict=True)]
    return [
        (path, name, number in marked) if held[number] and number not in ours else None
        for number, (path, name) in enumerate(zip(above, said, strict=True))
    ]


def _untracked_with(arrays: Sequence[Array], numbers: Mapping[int, set[int]]) -> list[tuple[Any, set[int]]]:
    """Containers that hold these arrays and that the collector does not know, with the numbers of those."""
    if not any(isinstance(one, np.ndarray) for one in arrays):
        return []
    heap = gc.get_objects()
    kinds = _kinds_of_holders(set(map(type, heap)))
    holders = [one for one in heap if type(one) in kinds]
    found = [
        (one, {number for child in gc.get_referents(one) for number in numbers.get(id(child), ())})
        for one in {id(one): one for one in _untracked([*gc.get_referents(*holders), *_values_in_frames()])}.values()
    ]
    return [(one, held) for one, held in found if held]


def _name(one: Array, path: set[int], holder: str) -> str:
    variables = (name for name, value in _variables() if id(value) in path or _is_in(one, value))
    return next(variables, holder or "a list or dict")

"""Checkpoints as files that everybody can read: safetensors with Hugging Face's index, one tensor per expert.

A folder has tensor files of each rank for three parts (model, optimizer, extra tensors), an index for each part, and
`checkpoint.json`, which is written last and has all that is no tensor, and size and checksum of every other file. File
names are new in each save, so a save that ends early leaves the old checkpoint whole.
"""

import hashlib
import json
import logging
import os
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..moe.experts.slices import is_sliced, whole_row
from ..utils.checksums import as_bytes
from ..utils.files import PARTIALS, write_file
from ..utils.text import one_line
from . import dcp
from .state import CheckpointError, Entry, Given, JointAccess, LogicalView, Saved, Stored, TensorSpec, stretch, value_of

logger = logging.getLogger("eplb_runtime")

MARKER = "checkpoint.json"
FORMAT, VERSION = "eplb-runtime-checkpoint", 4
PARTS, INDEX = ("model", "optimizer", "extra"), "{}.safetensors.index.json"
_TOKEN = "[0-9a-f]" * 16
_OURS = (
    *(f"{part}-?????-?????-{_TOKEN}.safetensors" for part in PARTS),
    *(INDEX.format(part) for part in PARTS),
    PARTIALS,
    ".tmp??????",  # what the library has begun stays where a process was killed
)
"""Names of files of a save, whole or not."""
FILE_BYTES = 4 << 30
"""Tensors of one file; on a GPU a rank needs as much memory on the host to write them."""

Format = Literal["safetensors", "dcp"]
Named = tuple[str, str, Tensor]
"""Part, name and values of a stored tensor."""
Sealed = tuple[int, str, Sequence[str]]
"""Size and checksum of a file, and names of the tensors in it."""


def save(folder: str | Path, model: nn.Module, optimizer: Given = None, *, format: Format = "safetensors") -> None:
    """Write a checkpoint in logical order, each rank its own experts, into a folder that all ranks see. Collective,
    between steps. Waits for an `async_save` of this model first. On top of its state a rank needs the memory of one
    expert's tensor. A checkpoint that is in the folder already is replaced in one step when the new one is whole.
    ``format``: ``"safetensors"``: one tensor per expert, Hugging Face's index, and ``checkpoint.json`` with checksums
    of all bytes, which is written last; ``"dcp"``: torch.distributed.checkpoint's, into a new folder, without
    checksums, with a pickle as metadata. Rank 0 logs a line. Raises CheckpointError: something cannot be kept in this
    format, or another rank failed; OSError: this rank could not write. The folder is as it was then."""
    view = LogicalView(model, optimizer)
    view.refuse_freed("save")
    wait_for_last_save(view)
    if format == "dcp":
        dcp.save(folder, view)
    elif format == "safetensors":
        _write(Path(folder), view, *_content(folder, view))
    else:
        raise CheckpointError(f"format={format!r} is unknown; choose one of: safetensors, dcp")
    log("saved to", folder, step_of(view))


def async_save(folder: str | Path, model: nn.Module, optimizer: Given = None) -> Future[None]:
    """Copy what this rank writes (see `save`) to the CPU, and write it on a thread while training goes on. Collective,
    between steps. Waits for the last `async_save` of this model first, so that memory holds one copy at most; the next
    save or load waits for this one. The thread talks over a group of the balancer's own, so that it cannot meet
    training's collectives. The future is done when all is on disk, or ``result()`` raises why not; either is logged.
    Raises CheckpointError: the model is not attached, and there are several ranks; or as `save`."""
    view = LogicalView(model, optimizer)
    view.refuse_freed("async_save")
    if view.balancer is None and len(JointAccess.of(view).ranks) > 1:
        raise CheckpointError("async_save needs a group of the balancer's own: attach the model, or use save")
    wait_for_last_save(view)
    access, live, numbers = _content(folder, view)
    tensors = [(part, name, value.to("cpu", copy=True)) for part, name, value in live]
    if view.balancer is not None:
        access = JointAccess(view.balancer.runtime.groups.background, torch.device("cpu"))
    step = step_of(view)

    def write() -> None:
        try:
            _write(Path(folder), view, access, tensors, numbers)
        except BaseException as error:
            tensors.clear()  # the traceback would keep them
            logger.warning("checkpoint not saved to %s: %s", folder, one_line(error, with_type=True))
            raise
        log("saved to", folder, step)

    worker = ThreadPoolExecutor(1, thread_name_prefix="eplb_runtime save")
    saving = worker.submit(write)
    worker.shutdown(wait=False)
    object.__setattr__(view.model, "_eplb_runtime_saving", [saving])
    return saving


def wait_for_last_save(view: LogicalView) -> None:
    """Wait until this model's last `async_save`, if there was one, has ended or failed."""
    wait(view.model.__dict__.get("_eplb_runtime_saving", ()))


def step_of(view: LogicalView) -> str:
    """Return which step of the balancer it is, for `log`; "": there is no balancer."""
    return "" if view.balancer is None else f", step {view.balancer.rebalancer.step} of the balancer"


def log(what: str, folder: str | Path, step: str) -> None:
    """Log a line on rank 0: what was done, the folder, and `step_of` the balancer."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.info("checkpoint %s %s%s", what, folder, step)


# -- what is written, under which names --------------------------------------------------------------------------------


def _content(folder: str | Path, view: LogicalView) -> tuple[JointAccess, Iterable[Named], Any]:
    """Return this rank's part in a save; the tensors that it writes; and, on the first rank of a stage, what is no
    tensor. Collective."""
    access = JointAccess.of(view)
    balancer = view.balancer.state_dict() if view.balancer is not None else None  # all ranks meet in it
    ranks = view.balancer.runtime.job.data_ranks if view.balancer is not None else access.ranks

    def content() -> tuple[Iterable[Named], Any]:
        layout, stored = _layout_of(view)
        groups = [{option: _to_json(value, option) for option, value in group.items()} for group in view.named_groups]
        numbers = {f"{name}.{key}": _to_json(value, key) for name, key, value in view.numbers()}
        first = access.ranks[access.number] == ranks[0]
        of_stage = {"layout": layout, "param_groups": groups, "numbers": numbers, "balancer": balancer}
        return _tensors_of_rank(view, stored, ranks), json.loads(json.dumps(of_stage)) if first else None  # a copy

    return access, *access.together(f"{folder} was not saved", content)


def _layout_of(view: LogicalView) -> tuple[dict[str, Any], list[tuple[Entry, Stored]]]:
    """Return how tensors are stored, by key; and those that are stored, tied ones once. Weights have the names of the
    framework's own checkpoints where the host knows them, else the model's own, with the number of the expert before
    the parameter's: ``experts.17.down_proj``. Optimizer state has the model's own."""
    by_host = view.folders.names(view) if view.folders is not None else {}
    found: dict[tuple[str, int], tuple[Entry, Stored]] = {}
    layout: dict[str, Any] = {}
    for entry in list(view.entries()):  # alive together: no two have one id by chance
        own, head = entry.key.partition(".")[2], entry.name.partition("/")[0].rpartition(".")[0]
        stored = by_host.get(entry.name) if entry.part == "model" else None
        if stored is None and entry.layer is not None:
            name = f"{head}.*.{own.removeprefix(f'{head}.')}".removeprefix(".")
            stored = Stored((name,), view.num_experts)
        _, stored = found.setdefault((entry.part, id(entry.tensor)), (entry, stored or Stored((own,))))
        layout[entry.key] = asdict(stored)
    return layout, list(found.values())


def _tensors_of_rank(
    view: LogicalView, layout: Iterable[tuple[Entry, Stored]], ranks: Sequence[int]
) -> Iterator[Named]:
    """Yield what this rank writes: its share of its experts, and, by size, of what all ``ranks`` hold; in live memory
    where that is whole. Collective where experts are sliced or tensors sharded: every rank goes through to the end."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    nbytes = dict.fromkeys(ranks, 0)
    for entry, stored in layout:
        if entry.layer is None:
            writer = min(nbytes, key=lambda rank: nbytes[rank])
            nbytes[writer] += entry.tensor.nbytes
            if writer == rank or isinstance(entry.tensor, DTensor):
                whole = value_of(entry.tensor)
                yield from ((entry.part, *part) for part in stored.cut(whole) if writer == rank)
            continue
        assert view.balancer is not None
        holders = view.balancer.runtime.job.edp_ranks
        for row, expert in enumerate(view.experts_here(entry.layer)):
            writer = holders[expert % len(holders)]
            if writer == rank or is_sliced(entry.tensor):
                one = whole_row(entry.tensor, row, view.balancer.runtime.groups)[0]
                yield from ((entry.part, *part) for part in stored.cut(one, expert) if writer == rank)


def _to_json(value: Any, name: str) -> Any:
    """An option as `json.dumps` takes it: of tensors and tuples the numbers."""
    plain = value.tolist() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
    try:
        retained = json.loads(json.dumps(plain)) == plain
    except (TypeError, ValueError):
        retained = False
    if not retained:
        kind = type(value).__name__
        raise CheckpointError(f"the optimizer's {name} is a {kind}, which JSON does not keep: save with format='dcp'")
    return plain


# -- writing ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _write(folder: Path, view: LogicalView, access: JointAccess, tensors: Iterable[Named], numbers: Any) -> None:
    problem, token = f"{folder} was not saved", access.new_token()
    mine = f"*-{access.number:05d}-*-{token}.*"

    def written() -> dict[str, Sealed]:
        files = write_tensors(folder, access.number, token, tensors)
        return {name: ((folder / name).stat().st_size, _checksum(folder / name), of) for name, of in files.items()}

    try:
        of_ranks = access.gather((access.together(problem, written), numbers))
    except BaseException:
        remove(folder, mine)
        raise
    files = {name: known for of_rank, _ in of_ranks for name, known in of_rank.items()}
    sizes = {folder / name: known[0] for name, known in files.items() if access.number == 0}
    unseen = [str(path) for path, size in sizes.items() if not os.path.isfile(path) or path.stat().st_size != size]
    # The first rank publishes after this meeting: from here on, files are removed only if it says that it does not.
    if said := access.gather(unseen[:1])[0]:
        remove(folder, mine)
        raise CheckpointError(f"rank {access.ranks[0]} does not see {said[0]}: give a folder that all ranks see")
    stages = [stage for _, stage in of_ranks if stage is not None]
    of_all = {
        "layout": {key: stored for stage in stages for key, stored in stage["layout"].items()},
        "param_groups": [group for stage in stages for group in stage["param_groups"]] or None,
        "numbers": {name: value for stage in stages for name, value in stage["numbers"].items()},
        "balancer": stages[0]["balancer"],
    }
    access.on_first(problem, lambda: _publish(folder, view, token, files, of_all))


def write_tensors(
    folder: Path, number: int, token: str, tensors: Iterable[Named], most_bytes: int = FILE_BYTES
) -> dict[str, list[str]]:
    """Write tensors into safetensors files of this rank (``number``), each with tensors of one part and up to
    ``most_bytes``; return the tensors' names in each file. Makes the folder. If that fails, the rest of ``tensors`` is
    run through (other ranks gather with this one), and files ``*-{token}.*`` are left for the caller to remove."""
    written: dict[str, list[str]] = {}
    batch: dict[str, Tensor] = {}
    of, nbytes = "", 0

    def write() -> None:
        path = folder / f"{of}-{number:05d}-{len(written):05d}-{token}.safetensors"
        _save_tensors(path, batch)
        written[path.name] = list(batch)
        batch.clear()

    remaining = iter(tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part, name, value in remaining:
            if batch and (part != of or nbytes + value.nbytes > most_bytes):
                write()
                nbytes = 0
            batch[name] = value
            of, nbytes = part, nbytes + value.nbytes
        if batch:
            write()
    except BaseException:
        deque(remaining, maxlen=0)  # other ranks gather what is sharded with this one
        raise
    return written


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and bring it to the disk. A dtype that the library has not is a CheckpointError."""
    whole: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().contiguous()
        whole[name] = value.clone() if value.data_ptr() in memory else value  # the library takes no memory twice
        memory.add(value.data_ptr())
    try:
        save_file(whole, path, {"format": "pt"})
    except KeyError as error:
        names = [name for name, value in whole.items() if value.dtype == error.args[0]]
        raise CheckpointError(f"{names[0]}: safetensors has no {error}: save with format='dcp'") from None
    except SafetensorError as error:
        raise OSError(f"{path}: {one_line(error)}") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _publish(
    folder: Path, view: LogicalView, token: str, files: Mapping[str, Sealed], numbers: Mapping[str, Any]
) -> None:
    """Make the files of all ranks, and numbers, the checkpoint of this folder, in one step, and remove the old one."""
    try:
        if (folder / "model.safetensors").exists():
            raise CheckpointError(f"{folder} has a model.safetensors, which would be read instead: give another folder")
        indexes = _indexes(folder, files)
        if view.folders is not None:
            view.folders.write_config(view, folder)
    except BaseException:
        remove(folder, f"*-{token}.*")
        raise
    # Between two of these, others read the new checkpoint and we the old one; both are whole.
    for name, data in indexes.items():
        write_file(folder / name, data)
    sealed = {name: known[:2] for name, known in files.items()}
    sealed |= {name: (len(data), xxhash.xxh3_128_hexdigest(data)) for name, data in indexes.items()}
    marker = {"format": FORMAT, "version": VERSION, "save": token, "files": sealed, **numbers}
    write_file(folder / MARKER, json.dumps({**marker, "checksum": checksum_of(marker)}))
    for pattern in _OURS:
        remove(folder, pattern, sealed)


def _indexes(folder: Path, files: Mapping[str, Sealed]) -> dict[str, bytes]:
    """Hugging Face's index of each part, by the name of its file."""
    indexes: dict[str, Any] = defaultdict(lambda: {"metadata": {"total_size": 0}, "weight_map": {}})
    for file, (size, _, names) in sorted(files.items()):
        index = indexes[INDEX.format(file.partition("-")[0])]
        index["metadata"]["total_size"] += size
        for name in names:
            other = index["weight_map"].setdefault(name, file)
            if other == file:
                continue
            one, two = (as_bytes(_opened(folder / path).get_tensor(name)) for path in (other, file))
            if not torch.equal(one, two):
                raise CheckpointError(f"{folder}: ranks differ in {name}: pipeline stages need names of their own")
    return {file: json.dumps(index, indent=2, sort_keys=True).encode() for file, index in indexes.items()}


def _checksum(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def remove(folder: Path, pattern: str, retained: Collection[str] = ()) -> None:
    """Remove the files of a folder that match a pattern, but those named in ``retained``. Errors are ignored."""
    for file in list(folder.glob(pattern)):
        with suppress(OSError):
            if file.name not in retained:
                file.unlink()


# -- reading ---------------------------------------------------------------------------------------------------------


def read_marker(folder: Path) -> dict[str, Any]:
    """Return what `checkpoint.json` says. CheckpointError: unreadable, another version, or its checksum is wrong."""
    path = folder / MARKER
    try:
        marker: dict[str, Any] = json.loads(path.read_text())
        own, kind = marker.pop("checksum"), f"{marker['format']!r} of version {marker['version']!r}"
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {one_line(error, with_type=True)}") from None
    if kind != f"{FORMAT!r} of version {VERSION}":
        mend = f"this reads version {VERSION}: load it by the release that wrote it, and save it with format='dcp'"
        raise CheckpointError(f"{path} is {kind}; {mend}")
    if own != checksum_of(marker):
        raise CheckpointError(f"{path} is damaged: it has another checksum than when it was saved")
    return marker


def checksum_of(marker: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(marker, sort_keys=True).encode())


def _verify(folder: Path, marker: Mapping[str, Any], access: JointAccess) -> None:
    """Read this rank's share of all files, and compare sizes and checksums. The first damaged file is named."""
    shares = [0] * len(access.ranks)
    for name, (nbytes, checksum) in marker["files"].items():
        mine = shares.index(min(shares))
        shares[mine] += nbytes
        path = folder / name
        # An index may be of a later save that did not come to its end.
        if mine != access.number or (".index." in name and marker["save"].encode() not in path.read_bytes()):
            continue
        if path.stat().st_size != nbytes or _checksum(path) != checksum:
            raise CheckpointError(f"{path} is damaged: it has another size or checksum than when it was saved")


class TensorFiles(Saved):
    """Open files of safetensors: which has a part's tensor of a name, and how the tensors of a model are stored."""

    def __init__(self, name: str, files: Mapping[tuple[str, str], Any], layout: Mapping[str, Stored]) -> None:
        self.name, self._files, self._layout = name, files, layout
        self.tensors = {key: self._spec(key, stored) for key, stored in layout.items()}

    def _spec(self, key: str, stored: Stored) -> TensorSpec:
        """Shape and dtype of a whole tensor, from those of its parts; the narrowest dtype."""
        if not 0 <= stored.experts <= len(self._files):
            raise CheckpointError(f"{self.name} has no {stored.experts} experts of {key}")
        every = [[self._slice(key, name) for name in stored.names_of(expert)] for expert in range(stored.experts or 1)]
        kinds = [[(part.get_shape(), part.get_dtype()) for part in slices] for slices in every]
        if any(kind != kinds[0] for kind in kinds):
            raise CheckpointError(f"experts of {key} in {self.name} have different shapes or dtypes")
        parts, dim = [part for part, _ in kinds[0]], stored.dim
        if any(part[:dim] + part[dim + 1 :] != parts[0][:dim] + parts[0][dim + 1 :] for part in parts):
            raise CheckpointError(f"parts of {key} in {self.name} do not fit together: they have shapes {parts}")
        shape = [sum(part[dim] for part in parts) if at == dim else size for at, size in enumerate(parts[0])]
        whole = (stored.experts, *shape) if stored.experts else tuple(shape)
        dtypes = [one[(slice(0, 0),) if shape else ()].dtype for one in every[0]]
        return TensorSpec(whole, min(dtypes, key=lambda dtype: dtype.itemsize))

    def _slice(self, key: str, name: str) -> Any:
        return self._files[key.partition(".")[0], name].get_slice(name)

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        stored = self._layout[key]
        first, at = (offsets[0], offsets[1:]) if stored.experts else (0, offsets)
        for expert, one in enumerate(block if stored.experts else [block], first):
            parts, inside = [self._slice(key, name) for name in stored.names_of(expert)], stretch(at, one)
            one.copy_(torch.cat([part[:] for part in parts], stored.dim)[inside] if parts[1:] else parts[0][inside])


def tensors_in(folder: Path, files: Iterable[str], part: str = "") -> dict[tuple[str, str], Any]:
    """Open safetensors files; return each tensor's open file by (part, name). ``part``: empty: as file names begin."""
    opened = {file: _opened(folder / file) for file in files}
    return {(part or file.partition("-")[0], name): of for file, of in opened.items() for name in of.keys()}  # noqa: SIM118


def opened(folder: Path, access: JointAccess) -> Saved:
    """Open a folder of our format, after comparing this rank's share of the checksums. CheckpointError: damaged."""
    marker = read_marker(folder)
    _verify(folder, marker, access)
    files = tensors_in(folder, (Path(file).name for file in marker["files"] if file.endswith(".safetensors")))
    layout = {key: Stored(**stored) for key, stored in marker["layout"].items()}
    saved = TensorFiles(str(folder), files, layout)
    saved.param_groups, saved.numbers, saved.balancer = (marker[key] for key in ("param_groups", "numbers", "balancer"))
    return saved


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from None

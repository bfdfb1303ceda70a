"""What the launchers start on each host: checked against stand-ins for python, Slurm and a cluster."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.observed import records

from eplb_runtime.observe.events_file import NAME, LineFile

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch"), ROOT / ".ci/run"])
OURS = ("NODES", "NODE_INDEX", "HEAD", "PORT", "PYTHON", "RANKS_PER_NODE", "JOB_ID", "INTERFACE", "LOCAL_ADDRESS")
OURS += ("RESTARTS", "MIN_NODES", "LAST_CALL_SECONDS", "HOST_LOST_SECONDS")


def executable(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def python_that_tells(tmp_path: Path) -> Path:
    """A python that has eplb_runtime and prints what it is asked to run."""
    return executable(tmp_path / "python", '[ "$1" = -c ] || echo "${GLOO_SOCKET_IFNAME:-any} $*"')


def run(script: str, arguments: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run(
        ["bash", str(ROOT / script), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env={**environment, **settings},
    )


def option(line: str, name: str) -> str:
    words = line.split()
    return words[words.index(name) + 1]


def linter(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: pip install '.[dev]'")
    return str(path)


def test_linters_find_nothing(tmp_path: Path) -> None:
    """Unquoted words, unchecked failures and the like in scripts; unpinned bases, users and shells of images."""
    shellcheck, hadolint = linter("shellcheck"), linter("hadolint")
    images = sorted(ROOT.glob("docker/*Dockerfile"))
    assert len(images) == 2
    subprocess.run([shellcheck, "-x", *SCRIPTS], check=True, timeout=60, cwd=ROOT)
    subprocess.run([hadolint, *images], check=True, timeout=60)
    careless = executable(tmp_path / "careless.sh", "rm -r $1/*")
    assert subprocess.run([shellcheck, careless], capture_output=True, timeout=60).returncode
    (tmp_path / "Dockerfile").write_text("FROM debian\nUSER root\n")
    assert subprocess.run([hadolint, tmp_path / "Dockerfile"], capture_output=True, timeout=60).returncode


def test_images_take_what_there_is_and_run_as_nobody_special() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for image in ROOT.glob("docker/*Dockerfile"):
        text = image.read_text()
        copied = {word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]}
        copied = {word for word in copied if not word.startswith("--")}
        assert copied <= kept and all((ROOT / name).exists() for name in copied)
        last = [line for line in text.splitlines() if line.startswith("USER ")][-1]
        assert (
            last == "USER 1000"
            and "HEALTHCHECK" in text
            and "chmod" not in text
            and "/tmp" not in text.split("FROM")[-1]
        )


def test_every_host_starts_torchrun_and_host_0_keeps_the_store(python_that_tells: Path) -> None:
    usual = {
        "NODES": "2",
        "HEAD": "head",
        "RANKS_PER_NODE": "4",
        "INTERFACE": "bond0",
        "PYTHON": str(python_that_tells),
    }
    for index in (0, 1):
        done = run("launch/multi_node.sh", ["job.py", "--own", "two words"], **usual, NODE_INDEX=str(index))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("bond0 -m torch.distributed.run --nnodes 2 --nproc-per-node 4 ")
        assert done.stdout.endswith(" job.py --own two words\n")
        assert option(done.stdout, "--rdzv-endpoint") == "head:29400"
        assert option(done.stdout, "--rdzv-conf").startswith(f"is_host={int(index == 0)},")
        assert "--local-addr" not in done.stdout
    elastic = {"NODES": "4", "NODE_INDEX": "1", "RESTARTS": "3", "MIN_NODES": "1", "HOST_LOST_SECONDS": "60"}
    done = run("launch/multi_node.sh", ["job.py"], **{**usual, **elastic})
    assert done.returncode == 0, done.stderr
    assert (option(done.stdout, "--nnodes"), option(done.stdout, "--max-restarts")) == ("1:4", "3")
    settings = dict(pair.split("=") for pair in option(done.stdout, "--rdzv-conf").split(","))
    assert int(settings["keep_alive_interval"]) * int(settings["keep_alive_max_attempt"]) >= 60


def test_slurm_starts_one_launcher_a_host(tmp_path: Path, python_that_tells: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    executable(tools / "scontrol", '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"')
    executable(tools / "srun", 'shift; for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done')
    done = run(
        "launch/slurm.sbatch",
        ["job.py", "--own", "option"],
        PATH=f"{tools}:{os.environ['PATH']}",
        PYTHON=str(python_that_tells),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="1234567",
        SLURM_JOB_NODELIST="node[3-4]",
        SLURM_NNODES="2",
    )
    assert done.returncode == 0, done.stderr
    hosts = done.stdout.splitlines()
    assert [option(host, "--rdzv-conf").split(",")[0] for host in hosts] == ["is_host=1", "is_host=0"]
    for host in hosts:
        assert option(host, "--rdzv-endpoint") == "node3:24567"
        assert option(host, "--rdzv-id") == "1234567"
        assert option(host, "--nproc-per-node") == "gpu"
        assert host.endswith(" job.py --own option")


def test_the_kubernetes_manifest_agrees_with_itself() -> None:
    service, job = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["HEAD"] == f"{name}-0.{service['metadata']['name']}"
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environment["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["RANKS_PER_NODE"])
    assert set(environment) <= {*OURS, "WAIT_SECONDS"}
    for argument in (container["command"][1], container["args"][0]):
        assert (ROOT / argument).is_file()


# -- The wheel, installed alone, has all that its commands need


BACKEND = 77
"""The version of setuptools that pyproject.toml asks for."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if int(version("setuptools").partition(".")[0]) < BACKEND:
        pytest.skip(f"setuptools is older than {BACKEND}: no wheel can be built here")
    folder = tmp_path_factory.mktemp("wheel")
    for part in ("eplb_runtime", "launch", "pyproject.toml", "README.md", "LICENSE"):  # a build leaves files behind
        (folder / part).symlink_to(ROOT / part)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    (folder / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return next((folder / "dist").glob("*.whl"))


def test_it_holds_page_samples_and_dashboards(wheel: Path) -> None:
    inside = {name.partition(".data/data/")[2] or name for name in zipfile.ZipFile(wheel).namelist()}
    page = {path.name for path in (ROOT / "eplb_runtime/observe/page").iterdir()}
    assert {f"eplb_runtime/observe/page/{name}" for name in page} <= inside and len(page) == 4
    assert {"eplb_runtime/tools/formats/sample.npz", "eplb_runtime/py.typed"} <= inside
    monitoring = {path.name for path in (ROOT / "launch/monitoring").iterdir()}
    assert {f"share/eplb_runtime/monitoring/{name}" for name in monitoring} <= inside
    assert not any(name.startswith(("tests/", "launch/")) or "__pycache__" in name for name in inside)


def test_its_commands_run_without_the_project(wheel: Path, tmp_path: Path) -> None:
    """Those that plan nothing: their kernels would be compiled anew in another place."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    zipfile.ZipFile(wheel).extractall(alone)
    first, *others = records()
    writer = LineFile(run / NAME, first)
    for record in others:
        writer.write(record)
    writer.close()
    for command in (["--version"], ["report", "run"]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "eplb_runtime.cli", *command],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(alone)}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000

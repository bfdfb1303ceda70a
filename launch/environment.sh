# shellcheck shell=bash
# Sourced by demo.sh and test.sh: makes .venv at the project's root and installs what is missing. Safe to run twice.
#   PYTHON=python3.12   takes that interpreter for a new venv

if [ "${BASH_SOURCE[0]}" = "$0" ]; then # run by itself, with --help or without
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several ranks share the cores
unset PYTHONDONTWRITEBYTECODE # else each rank compiles the package for itself, half a second
export PIP_DISABLE_PIP_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

say() { printf '\n== %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Debian keeps some of what we need in packages of their own; as root we can fetch them, else we name them.
debian_package() { # name, why
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing Debian's $1 ($2)"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$1" >/dev/null && return 0
    fi
    return 1
}

make_venv() {
    local python=${PYTHON:-python3} options=()
    command -v "$python" >/dev/null || die "$python is not installed: install Python 3.11 or newer, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$python" --version) is too old: Python 3.11 or newer is needed; set PYTHON to one"
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        options=(--system-site-packages)
    fi
    say "making .venv with $("$python" --version)${options:+ (with the CUDA build of torch that is there)}"
    if ! "$python" -m venv "${options[@]}" .venv 2>/dev/null; then
        rm -rf .venv
        # shellcheck disable=SC2015 # whichever of the two fails, it is said
        debian_package python3-venv "python's venv module" && "$python" -m venv "${options[@]}" .venv ||
            die "$python cannot make a venv: install python3-venv"
    fi
}

# What it starts takes a minute and a core where sources have changed, else seconds; `planner_compiled` waits for it.
install_project() { # extra
    local constraints=launch/constraints-cpu.txt
    if .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        constraints=.venv/constraints-cuda.txt
        {
            .venv/bin/python -c 'import torch; print(f"torch=={torch.__version__}")'
            grep -v '^torch==' launch/constraints-cpu.txt
        } >"$constraints"
    fi
    stamp="$1 $(cat pyproject.toml "$constraints" | sha256sum)"
    if [ "$(cat .venv/installed 2>/dev/null)" != "$stamp" ]; then
        say "installing eplb-runtime[$1] and what it needs ($(grep -o 'torch==.*' "$constraints"))"
        .venv/bin/python -m pip install --quiet --constraint "$constraints" --editable ".[$1]" ||
            die "the installation failed; see pip's message above"
        printf '%s' "$stamp" >.venv/installed
        say "compiling the planner's kernels (kept for later runs)"
    fi
    .venv/bin/python -m eplb_runtime.cli warmup >/dev/null &
    compiling=$!
}

# A package for Python 3.12 and up, whose Python runs from a folder under 3.11, too.
of_newer_python() { # package version
    local folder=.venv/$1-$2
    [ -d "$folder" ] && return 0
    rm -rf "$folder.partial"
    .venv/bin/python -m pip install --quiet --retries 1 --no-deps --python-version 3.12 --ignore-requires-python \
        --only-binary=:all: --target "$folder.partial" "$1==$2" && mv "$folder.partial" "$folder"
}

planner_compiled() {
    wait "$compiling" || die "the planner cannot be compiled; see the message above"
}

[ -x .venv/bin/python ] || make_venv

#!/usr/bin/env bash
# All tests: style and types first, then pytest in one run, several files at a time, and beside it the tests of several
# hosts: ranks wait for each other, links and deadlines for much of their time. EPLB_TEST_PROCESSES says how many files at
# a time (4). Those that take longest begin first, by tests/seconds.json: EPLB_TEST_SECONDS=write measures it anew.
# Tests that repeat in another shape what a shorter one shows, and mutants of the package, are left out:
#   bash launch/test.sh --long                     # these, too
# Other arguments go to pytest:
#   bash launch/test.sh tests/unit -k placement
set -euo pipefail
# shellcheck source=launch/usage.sh
. "$(dirname "$0")/usage.sh"
# shellcheck source=launch/environment.sh
. "$(dirname "$0")/environment.sh"
install_project dev
of_all=()
if [ "${1:-}" = --long ]; then
    of_all=(-m "")
    shift
fi
if [ $# = 0 ]; then
    of_newer_python megatron-core 0.19.2 || say "without Megatron-Core 0.19.2 its tests are skipped"
    of_torchtitan=(torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1)
    .venv/bin/python -m pip install --quiet --retries 1 --no-deps "${of_torchtitan[@]}" ||
        say "without torchtitan 0.3.0 its tests are skipped"
    of_newer_python emerging-optimizers 0.3.0 || say "without emerging-optimizers 0.3.0 tests of Megatron's Muon are skipped"
    deepep=$(sed -n 's/^tokenspeed-deepep==//p' docker/cuda.txt)
    export EPLB_RUNTIME_DEEPEP_SOURCE="$PWD/.venv/tokenspeed-deepep-$deepep/deep_ep"
    of_newer_python tokenspeed-deepep "$deepep" || say "without DeepEP's wheel the double is not held to its signatures"
    command -v ip >/dev/null || debian_package iproute2 "hosts of network namespaces for the multi-node tests" ||
        say "without iproute2 the multi-node tests are skipped"
    command -v chromium >/dev/null || debian_package chromium "a browser for the tests of the live page" ||
        say "without chromium the tests of the page are skipped"
    command -v promtool >/dev/null || debian_package prometheus "for the tests of alert rules and dashboard" ||
        say "without Prometheus the tests of alert rules and dashboard are skipped"
    command -v slurmctld >/dev/null || debian_package slurm-wlm "for the test of the launcher under Slurm itself" ||
        say "without Slurm its test is skipped"
    say "ruff and mypy"
    .venv/bin/ruff check .
    .venv/bin/ruff format --check --quiet .
    .venv/bin/mypy eplb_runtime
fi
planner_compiled
say "pytest"
[ $# = 0 ] || exec .venv/bin/python -m pytest "${of_all[@]}" "$@"
of_hosts=$(mktemp)
.venv/bin/python -m pytest "${of_all[@]}" tests/multinode >"$of_hosts" 2>&1 &
hosts=$!
trap 'kill "$hosts" 2>/dev/null || true; rm -f "$of_hosts"' EXIT
failed=0
.venv/bin/python -m pytest "${of_all[@]}" tests --ignore tests/multinode --numprocesses "${EPLB_TEST_PROCESSES:-4}" \
    --dist loadfile --no-loadscope-reorder || failed=$?
wait "$hosts" || failed=$?
cat "$of_hosts"
exit "$failed"

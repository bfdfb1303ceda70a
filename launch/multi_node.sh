#!/usr/bin/env bash
# One job over several hosts: run this on every host, with the same settings but NODE_INDEX.
#
#   host 0:  NODES=2 NODE_INDEX=0 HEAD=10.0.0.1 bash launch/multi_node.sh launch/train_moe.py --device cuda --backend nccl
#   host 1:  NODES=2 NODE_INDEX=1 HEAD=10.0.0.1 bash launch/multi_node.sh launch/train_moe.py --device cuda --backend nccl
#
# It is plain torchrun: the ranks of a host are consecutive, and the balancer takes hosts for nodes (LOCAL_WORLD_SIZE).
# Which host gets the first ranks is torchrun's choice; keep what rank 0 writes on a file system that all hosts share.
set -euo pipefail
# shellcheck source=launch/usage.sh
. "$(dirname "$0")/usage.sh"
cd "$(dirname "$0")/.."

die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# -- what you must set ------------------------------------------------------------------------------------------------
[ $# -gt 0 ] || die "which script? usage: NODES=.. NODE_INDEX=.. HEAD=.. bash launch/multi_node.sh SCRIPT [ARGUMENTS]"
: "${NODES:?how many hosts the job has}"
: "${NODE_INDEX:?number of this host, 0 .. NODES-1}"
: "${HEAD:?name or address of host 0, as the other hosts reach it}"

# -- what you may set -------------------------------------------------------------------------------------------------
PORT=${PORT:-29400}                          # free on host 0, open to the other hosts
RANKS_PER_NODE=${RANKS_PER_NODE:-gpu}        # "gpu": one rank a GPU; a number on hosts without; equal on every host
JOB_ID=${JOB_ID:-eplb}                       # tells apart jobs that meet at the same host and port
WAIT_SECONDS=${WAIT_SECONDS:-600}            # how long hosts wait for each other at the start
RESTARTS=${RESTARTS:-0}                      # how often to start anew after a failure; the script must resume by itself
MIN_NODES=${MIN_NODES:-$NODES}               # fewer than NODES: goes on with so many if hosts are lost (not host 0)
LAST_CALL_SECONDS=${LAST_CALL_SECONDS:-30}   # with MIN_NODES: how long those that are there wait for more
HOST_LOST_SECONDS=${HOST_LOST_SECONDS:-15}   # a host that says nothing for so long is lost
INTERFACE=${INTERFACE:-}                     # network interface between the hosts (eth0, bond0), if the default is wrong
LOCAL_ADDRESS=${LOCAL_ADDRESS:-}             # this host's address on it, if its host name does not lead the others here
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # CPU threads of a rank

[ "$NODE_INDEX" -lt "$NODES" ] || die "NODE_INDEX=$NODE_INDEX: hosts are numbered 0 .. $((NODES - 1))"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
"$PYTHON" -c 'import eplb_runtime' || die "$PYTHON has no eplb_runtime: pip install -e '.[transformers]', or set PYTHON"
if [ -n "$INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
nodes=$NODES
[ "$MIN_NODES" = "$NODES" ] || nodes=$MIN_NODES:$NODES
# A second life must not find the first one's addresses in the store that torchrun shares with the ranks.
[ "$RESTARTS" = 0 ] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

is_host=$([ "$NODE_INDEX" = 0 ] && echo 1 || echo 0) # host 0 keeps the store where the ranks meet
conf=is_host=$is_host,join_timeout=$WAIT_SECONDS,read_timeout=$WAIT_SECONDS,last_call_timeout=$LAST_CALL_SECONDS
conf=$conf,keep_alive_interval=$(((HOST_LOST_SECONDS + 2) / 3)),keep_alive_max_attempt=3
exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$JOB_ID" \
    --rdzv-conf "$conf" \
    ${LOCAL_ADDRESS:+--local-addr "$LOCAL_ADDRESS"} "$@"

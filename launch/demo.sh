#!/usr/bin/env bash
# The main job: trains a small MoE from the same seed on 4 ranks with fixed experts, with rebalanced experts and with
# replica slots, and shows that rebalancing changed the load and not one bit of the result. Then it trains on two ranks
# of one thread each, where nobody shares a core, and shows what that gains in time. Arguments go to
# launch/train_moe.py: --steps N, --out FOLDER, --listen PORT, --profile FOLDER, --device cuda ...
#   RANKS=2 bash launch/demo.sh --steps 80
set -euo pipefail
# shellcheck source=launch/usage.sh
. "$(dirname "$0")/usage.sh"
# shellcheck source=launch/environment.sh
. "$(dirname "$0")/environment.sh"
install_project test
planner_compiled
say "training on ${RANKS:=4} ranks: experts fixed, then rebalanced while the job runs, then with replica slots"
.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$RANKS" launch/train_moe.py "$@"
if [ "$(env -u OMP_NUM_THREADS nproc)" -ge 2 ]; then
    say "two ranks, a core each, uneven load: a step with experts fixed, moved, with replicas (two minutes)"
    .venv/bin/python -m eplb_runtime.cli bench train --repeats 1
fi

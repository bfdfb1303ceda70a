#!/usr/bin/env bash
# The main job: trains a small MoE from the same seed on 4 ranks with fixed experts, with rebalanced experts and with
# replica slots, and shows that rebalancing changed the load and not one bit of the result. Arguments go to
# launch/train_moe.py (--help).
#   RANKS=2 bash launch/demo.sh --steps 80
set -euo pipefail
. "$(dirname "$0")/environment.sh"
install_project test
say "training on ${RANKS:=4} ranks: experts fixed, then rebalanced while the job runs, then with replica slots"
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$RANKS" launch/train_moe.py "$@"

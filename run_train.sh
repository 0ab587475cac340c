#!/usr/bin/env bash
# Trains a model; on a fresh machine it first makes .venv and the tiny base model.
#
#   ./run_train.sh                                            the default job, on the CPU, one rank
#   NGPU=2 ./run_train.sh --config train_configs/<file>.toml --training.steps 20
#   ./run_train.sh --dry-run --world-size 64 --gpu-gib 80 ...  checks and plans a job, starts nothing
#
# NGPU: ranks on this machine (torchrun when > 1); NNODES, NODE_RANK, MASTER_ADDR: several machines (docs/cluster.md).
# Every flag goes to the training program; --help lists them.
# Exit codes: 0 done, 2 something the user can cure, 1 anything else, 130 / 143 after Ctrl-C / SIGTERM.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
. "$here/scripts/bootstrap.sh" ""
exec "$ROLLVERIFY_PYTHON" -m rollverify.launch --nproc "${NGPU:-1}" -- "$@"

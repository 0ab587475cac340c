#!/usr/bin/env bash
# Shows in about ten minutes whether this machine's GPU trains as it should: prints a table, writes
# gpu_proof.json, and ends with 1 if a check failed. See docs/gpu.md.
#
#   scripts/gpu_proof.sh [OUTPUT.json]
#   ROLLVERIFY_DEVICE=cpu scripts/gpu_proof.sh     the same on CPUs, to try the script itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/bootstrap.sh dev
exec "$ROLLVERIFY_PYTHON" scripts/gpu_proof.py "$@"

#!/usr/bin/env bash
# Runs every test on two processes: the fast ones, then those with a real engine and several ranks,
# the longest first so that both processes end at about the same time.
# Tests that need a GPU skip themselves where there is none.
#
#   ./run_tests.sh                         everything
#   ./run_tests.sh tests/unit -k launch    what is named, by pytest's own flags
#   ./run_tests.sh -n 0 --pdb              in one process
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cd "$here"
. "$here/scripts/bootstrap.sh" dev
run() { "$ROLLVERIFY_PYTHON" -m pytest -m "" -n 2 --dist loadfile --no-loadscope-reorder "$@"; }
for word in "$@"; do [[ $word != tests* ]] || { run "$@"; exit; }; done
code=0
OMP_NUM_THREADS=1 run tests/unit tests/rules "$@" || code=$?
run tests/integration tests/distributed tests/gpu tests/ext "$@" || code=$?
exit "$code"

#!/usr/bin/env bash
# Runs every test, on two processes: the long ones first, so that both end at about the same time.
# Tests that need a GPU skip themselves where there is none.
#
#   ./run_tests.sh                         everything
#   ./run_tests.sh tests/unit -k launch    what is named, by pytest's own flags
#   ./run_tests.sh -n 0 --pdb              in one process
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cd "$here"
. "$here/scripts/bootstrap.sh" dev
# Two processes share the cores: with more threads each, both would wait for threads that sleep.
export OMP_NUM_THREADS=1
all=(tests/integration tests/distributed tests/ext tests/unit tests/rules)
for word in "$@"; do [[ $word != tests* ]] || all=(); done
exec "$ROLLVERIFY_PYTHON" -m pytest -m "" -n 2 --dist loadfile --no-loadscope-reorder "${all[@]}" "$@"

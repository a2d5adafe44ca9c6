#!/bin/sh
# Makes .venv in the current folder (the clone) and installs what is needed: scripts/setup.sh demo|dev
#
#   PYTHON   the Python to use; default: python3.11, else the newest python3 >= 3.10 that can make environments
#   TORCH    what to install as PyTorch; default: the version in requirements-dev.txt
#
# A stamp in .venv holds a checksum of all that the set-up depends on, so a repeated call returns at once.
set -eu

TORCHVISION="torchvision==0.28.0"
VENV=".venv"
VENV_PYTHON="$VENV/bin/python"

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Exit status: 0 usable, 3 too old, 4 cannot make environments, anything else cannot run.
probe() {
    "$1" -c '
import sys
if sys.version_info < (3, 10):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
' >/dev/null 2>&1
}

explain() { # python, status
    case "$2" in
    3) echo "$1 is $("$1" -c 'import platform; print(platform.python_version())'): too old, 3.10 or newer is needed" ;;
    4) echo "$1 has no venv or ensurepip module (Debian, Ubuntu: install the package python3-venv)" ;;
    *) echo "$1 cannot be run" ;;
    esac
}

find_python() {
    reasons=""
    for candidate in "$@"; do
        if ! command -v "$candidate" >/dev/null 2>&1; then
            [ "$#" -gt 1 ] || reasons="
  $candidate is not there"
            continue
        fi
        status=0
        probe "$candidate" || status=$?
        if [ "$status" -eq 0 ]; then
            FOUND="$candidate"
            return 0
        fi
        reasons="$reasons
  $(explain "$candidate" "$status")"
    done
    die "no suitable Python found. Expected: Python 3.10 or newer with venv. Tried: $*.${reasons}" \
        "Install one, or name one: make PYTHON=/path/to/python3.11 ..."
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

# Whether .venv works and is of the Python that was asked for, if one was.
venv_fits() {
    [ -x "$VENV_PYTHON" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$VENV_PYTHON")" ]
}

make_venv() {
    if venv_fits && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    if [ -n "${PYTHON:-}" ]; then
        find_python "$PYTHON"
    else
        find_python python3.11 python3.14 python3.13 python3.12 python3.10 python3 python
    fi
    echo "setup: making $VENV with $FOUND ($(version_of "$FOUND"))"
    "$FOUND" -m venv --clear "$VENV" || die "$FOUND could not make $VENV (Debian, Ubuntu: install python3-venv)"
}

install() {
    "$VENV_PYTHON" -m pip install --quiet --quiet --disable-pip-version-check "$@" ||
        die "pip could not install: $*" \
            "Another Python: make PYTHON=python3.11 ...; another PyTorch (a version or the path of a wheel): make TORCH=... ..."
}

fingerprint() {
    { pwd && echo "$TORCH" && cat pyproject.toml requirements-dev.txt scripts/setup.sh; } | cksum
}

what="${1:-}"
case "$what" in demo | dev) ;; *) die "usage: scripts/setup.sh demo|dev, got '$what'" ;; esac
[ -f pyproject.toml ] && [ -f requirements-dev.txt ] || die "run it in the clone's folder (through make), not in $(pwd)"
TORCH="${TORCH:-$(sed -n '/^torch==/p' requirements-dev.txt)}"

stamp="$VENV/.setup-$what"
current=$(fingerprint)
if venv_fits && [ "$(cat "$stamp" 2>/dev/null || true)" = "$current" ]; then
    exit 0
fi

make_venv
rm -f "$VENV/.setup-demo" "$VENV/.setup-dev"
echo "setup: installing into $VENV (the first time takes minutes: PyTorch is large)"
install "$TORCH"
if [ "$what" = demo ]; then
    install --editable ".[demo]"
else
    # The package first, so that a failure of its own metadata shows before the tools are fetched.
    install --editable ".[all]"
    sed '/^torch==/d' requirements-dev.txt >"$VENV/requirements-tools.txt"
    install --requirement "$VENV/requirements-tools.txt"
    install --no-deps "$TORCHVISION"
    echo "$current" >"$VENV/.setup-demo"
fi
echo "$current" >"$stamp"

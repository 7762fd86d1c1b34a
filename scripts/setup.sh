# Sets up .venv in the repository: sourced by quickstart.sh and test.sh. Quick when nothing has changed.
# CONSTRAINTS: file of the versions; left out: constraints.txt (docs/versions.md)
# Leaves: the working directory at the repository's root, .venv/bin first in PATH.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# Without compiled files every process would compile PyTorch's sources anew.
unset PYTHONDONTWRITEBYTECODE

say() { printf '\033[1m== %s\033[0m\n' "$*"; }

# Prints the path of a Python 3.12, if there is one. Each candidate is run: pyenv's shims are there without their Python.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
    "$(command -v uv >/dev/null && uv python find 3.12 2>/dev/null)"; do
    [ -n "$candidate" ] || continue
    "$candidate" -c 'import sys; assert sys.version_info[:2] == (3, 12); print(sys.executable)' 2>/dev/null && return
  done
  return 1
}

make_venv() {
  local python
  if python=$(find_python); then
    say "Making a virtual environment in .venv with $python"
    "$python" -m venv .venv && return
    rm -rf .venv
    command -v uv >/dev/null || { echo "This Python lacks venv. On Debian and Ubuntu: apt install python3.12-venv" >&2; return 1; }
  fi
  if command -v uv >/dev/null; then
    say "Making a virtual environment in .venv with uv, which fetches a Python 3.12 where there is none"
    uv venv --seed --python 3.12 .venv && return
  fi
  cat >&2 <<'TEXT'
No Python 3.12 was found (megatron-core needs it). Ways to get one:
  uv python install 3.12              (uv: https://docs.astral.sh/uv)
  pyenv install 3.12
  apt install python3.12 python3.12-venv          (Ubuntu 24.04, Debian 13)
  brew install python@3.12                        (macOS)
or set PYTHON to one that is elsewhere: PYTHON=/opt/python3.12/bin/python scripts/quickstart.sh
TEXT
  return 1
}

.venv/bin/python -c 'import sys; assert sys.version_info[:2] == (3, 12)' 2>/dev/null || { rm -rf .venv; make_venv; } || exit 1

constraints=${CONSTRAINTS:-constraints.txt}
stamp=$(cat pyproject.toml "$constraints" scripts/setup.sh | cksum)
if [ "$stamp" != "$(cat .venv/.installed 2>/dev/null)" ]; then
  say "Installing megaswift and what it needs into .venv (PyTorch is large: some minutes the first time)"
  [ -x .venv/bin/uv ] || .venv/bin/python -m pip install --quiet uv || exit 1
  install() { .venv/bin/uv pip install --quiet --python .venv/bin/python -c "$constraints" "$@" -e '.[dev]'; }
  # Without a GPU, PyTorch's own index has a build of a tenth of the size; where it cannot be reached, the usual one does.
  if command -v nvidia-smi >/dev/null || ! install --torch-backend=cpu 2>/dev/null; then install || exit 1; fi
  printf '%s\n' "$stamp" >.venv/.installed
fi
export PATH="$PWD/.venv/bin:$PATH"

#!/usr/bin/env bash
# Checks everything: lint, format, types, tests. Sets up .venv first; needs no GPU.
#   scripts/test.sh                  all but the long tests
#   scripts/test.sh --quick          the fast tests only
#   scripts/test.sh --long           all of them
#   scripts/test.sh -k infer -x      further arguments are pytest's
set -u
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

marks="not long"
case "${1:-}" in
  --quick) marks="not slow and not long"; shift ;;
  --long) marks=""; shift ;;
  -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

failed=()
check() {
  say "$*"
  "$@" || failed+=("$1")
}
check ruff check .
check ruff format --check .
check pyright
check pytest -m "$marks" "$@"

[ ${#failed[@]} -eq 0 ] || { say "Failed: ${failed[*]}"; exit 1; }
say "All checks passed"

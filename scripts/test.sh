#!/usr/bin/env bash
# Checks everything: lint, format, types, tests. Sets up .venv first; needs no GPU.
#   scripts/test.sh                  all but the long tests, and a few of these: other ones each day
#   scripts/test.sh --quick          the fast tests only
#   scripts/test.sh --long           all of them
#   scripts/test.sh --proofs         the proofs alone: quickstart.sh, and models that learn (scripts/learn*.py)
#   scripts/test.sh -k infer -x      further arguments are pytest's
set -u
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

marks="not long and not proof"
sample=(--sample-seed "$(date +%Y%m%d)")
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)))')
# A worker imports torch: 1 to 2 GiB each. One that dies ends the run: pytest-xdist can wait for it forever.
parallel=(-n $((cores < 4 ? cores : 4)) --no-loadscope-reorder --max-worker-restart 0)
case "${1:-}" in
  --quick) marks="not slow and not long and not proof"; sample=(); shift ;;
  --long) marks=""; sample=(); parallel=(); shift ;;
  --proofs) shift; exec pytest -m "proof and not long" --durations=0 --durations-min=1 "$@" ;;
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
[ $# -eq 0 ] || { sample=(); parallel=(); }

failed=()
check() {
  say "$*"
  "$@" || failed+=("$1")
}
check ruff check .
check ruff format --check .
check pyright
check pytest -m "$marks" "${parallel[@]}" "${sample[@]}" "$@"

[ ${#failed[@]} -eq 0 ] || { say "Failed: ${failed[*]}"; exit 1; }
say "All checks passed"

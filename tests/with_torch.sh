#!/usr/bin/env bash
# The tests under other releases of torch, each in a virtual environment of its own that is thrown
# away: tests/with_torch.sh 2.12.1 2.14.1 2.15.0
# A CUDA build of torch is several gigabytes. NVGEMM_TORCH_VENVS=DIR keeps the environments there.
# Arguments after -- go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do versions+=("$1"); shift; done
[ $# -eq 0 ] || shift
if [ ${#versions[@]} -eq 0 ]; then
    echo "usage: tests/with_torch.sh VERSION... [-- PYTEST-ARGUMENT...]" >&2
    exit 2
fi

failed=()
for version in "${versions[@]}"; do
    if [ -n "${NVGEMM_TORCH_VENVS:-}" ]; then
        venv="$NVGEMM_TORCH_VENVS/torch-$version"
    else
        venv="$(mktemp -d)/torch-$version"
        trap 'rm -rf "$(dirname "$venv")"' EXIT
    fi
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install -q -c <(grep -v '^torch==' constraints.txt) ".[build,test]" "torch==$version"
    echo "torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)')"
    "$venv/bin/pytest" -q "$@" || failed+=("$version")
    [ -n "${NVGEMM_TORCH_VENVS:-}" ] || rm -rf "$(dirname "$venv")"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed under torch ${failed[*]}" >&2
    exit 1
fi

#!/usr/bin/env bash
# All tests, the slow ones too, under other releases of torch, each in a virtual environment of its
# own that is thrown away: tests/with_torch.sh 2.12.1 2.14.1 2.15.0
# --dependencies oldest installs the oldest releases of everything else that pyproject.toml allows,
# newest the newest; without it they are those of constraints.txt.
# A CUDA build of torch is several gigabytes. NVGEMM_TORCH_VENVS=DIR keeps the environments there.
# Arguments after -- go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=()
dependencies=pinned
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    case "$1" in
        --dependencies) dependencies="${2:-}"; shift 2 || shift ;;
        *) versions+=("$1"); shift ;;
    esac
done
[ $# -eq 0 ] || shift
if [ ${#versions[@]} -eq 0 ] || [[ ! "$dependencies" =~ ^(oldest|pinned|newest)$ ]]; then
    echo "usage: tests/with_torch.sh [--dependencies oldest|newest] VERSION... [-- PYTEST-ARGUMENT...]" >&2
    exit 2
fi

# The oldest releases of the dependencies that can be installed together with the tests' tools, some
# of which need newer ones than we do; without torch's own.
oldest() {
    "$1/bin/pip" install -q 'uv>=0.8,<1'
    "$1/bin/uv" pip compile pyproject.toml --extra build --extra test --resolution lowest-direct --quiet \
        --no-annotate --no-header --python "$1/bin/python" |
        grep -E '^(apache-tvm-ffi|click|nvidia-cutlass-.*|nvidia-matmul-heuristics|packaging|pydantic|pyelftools|pyyaml|wheel|zstandard)=='
}

failed=()
for version in "${versions[@]}"; do
    name="torch-$version-$dependencies"
    if [ -n "${NVGEMM_TORCH_VENVS:-}" ]; then
        venv="$NVGEMM_TORCH_VENVS/$name"
    else
        venv="$(mktemp -d)/$name"
        trap 'rm -rf "$(dirname "$venv")"' EXIT
    fi
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    case "$dependencies" in
        pinned) constraints="$(grep -v '^torch==' constraints.txt)" ;;
        oldest) constraints="$(oldest "$venv")" ;;
        newest) constraints="" ;;
    esac
    upgrade=()
    [ "$dependencies" != newest ] || upgrade=(--upgrade --upgrade-strategy eager)
    "$venv/bin/pip" install -q "${upgrade[@]}" -c <(echo "$constraints") ".[build,test]" "torch==$version"
    echo "torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)'), $dependencies dependencies:"
    "$venv/bin/pip" list 2>/dev/null | grep -iE '^(apache-tvm-ffi|nvidia-cutlass[a-z0-9-]*|zstandard|click|pyelftools|pydantic|pyyaml|wheel|packaging) '
    "$venv/bin/pytest" -q -m "" "$@" || failed+=("$version")
    [ -n "${NVGEMM_TORCH_VENVS:-}" ] || rm -rf "$(dirname "$venv")"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed under torch ${failed[*]} with $dependencies dependencies" >&2
    exit 1
fi

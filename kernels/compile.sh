#!/usr/bin/env bash
# Makes paged.ptx of paged.cu. It needs no GPU, no driver and no CUDA toolkit: the compiler comes from PyPI.
#   kernels/compile.sh            compiles
#   kernels/compile.sh --check    fails if paged.ptx is not what paged.cu compiles to
# Both then assemble it for the GPUs of today, which finds what the driver would refuse.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
cache=${KVGATE_TEST_CACHE:-$HOME/.cache/kvgate-tests}
venv=$cache/kernels-venv

case ${1:-} in
    "") out=paged.ptx ;;
    --check)
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        out=$work/paged.ptx
        ;;
    *)
        echo "usage: kernels/compile.sh [--check]" >&2
        exit 2
        ;;
esac

if ! cmp -s requirements.txt "$venv/requirements.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r requirements.txt
    cp requirements.txt "$venv/requirements.txt"
fi

"$venv/bin/python" -B nvrtc.py paged.cu "$out"
if [ "$out" != paged.ptx ] && ! cmp "$out" paged.ptx; then
    echo "kernels/paged.ptx is not what kernels/paged.cu compiles to: run kernels/compile.sh and commit it" >&2
    exit 1
fi

ptxas=$(echo "$venv"/lib/python3*/site-packages/nvidia/cuda_nvcc/bin/ptxas)
chmod +x "$ptxas"
for arch in sm_80 sm_90 sm_100; do
    words=$("$ptxas" -v -arch="$arch" -o /dev/null "$out" 2>&1)
    registers=$(grep -o 'Used [0-9]* registers' <<<"$words" | grep -o '[0-9]*' | sort -n | tail -1)
    if grep -q 'bytes spill' <<<"$words" && ! grep -q '0 bytes spill stores, 0 bytes spill loads' <<<"$words"; then
        echo "$words" >&2
        echo "registers are spilled on $arch" >&2
        exit 1
    fi
    echo "$arch: $registers registers"
done

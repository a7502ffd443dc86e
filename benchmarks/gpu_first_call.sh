#!/bin/sh
# All of tests/gpu and the speed of products with small floats, in the order in which a short time on a GPU is spent
# best: the newest kernels first, then their speed, then everything else. Each part has a limit of its own, and what
# fails does not keep the next part from running. Everything that is printed is also in the folder that is named.
#
#     sh benchmarks/gpu_first_call.sh [FOLDER]                a whole run: up to 29 minutes
#     PARTS="new speed" sh benchmarks/gpu_first_call.sh       up to 9 minutes: one call of ten
#
# Tests of trained models need the folder of goldens that tests/conftest.py looks for; without it they are skipped.
# Kernels are compiled by several processes; the first part takes a minute longer than the figures of a second run.
set -u
cd "$(dirname "$0")/.."
out=${1:-gpu-first-call}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
failed=""
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { echo "there is no GPU here"; exit 3; }

part() { # name, limit in seconds, command ...
    name=$1 limit=$2
    shift 2
    began=$(date +%s)
    echo "== $name (at most $limit s): $*"
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    tail -n 25 "$out/$name.log"
    echo "== $name: exit $code after $(($(date +%s) - began)) s"
    [ $code -eq 0 ] || failed="$failed $name"
}

tests() { # name, limit, files ...
    name=$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m pytest -q -m gpu -p no:cacheprovider --durations=8 "$@"
}

for one in ${PARTS:-new speed formats adapters hybrids attention engine large rest}; do
    case $one in
    new) tests new 240 tests/gpu/test_small_floats_on_gpu.py tests/gpu/test_newer_families.py \
        tests/gpu/test_mxfp4_experts.py ;;
    speed) part speed 280 "$python" benchmarks/gpu_small_floats.py --seconds 240 --output "$out/small-floats.json" ;;
    formats) tests formats 180 tests/gpu/test_kept_formats.py tests/gpu/test_few_rows.py tests/gpu/test_hopper_gemm.py ;;
    adapters) tests adapters 120 tests/gpu/test_adapters_on_gpu.py ;;
    hybrids) tests hybrids 180 tests/gpu/test_hybrids_on_gpu.py tests/gpu/test_lfm2_engine.py ;;
    attention) tests attention 120 tests/gpu/test_invariance.py tests/gpu/test_trained_on_gpu.py ;;
    engine) tests engine 240 tests/gpu/test_cuda_engine.py tests/gpu/test_streams.py tests/gpu/test_upload.py ;;
    large) tests large 180 tests/gpu/test_large_shapes.py tests/gpu/test_memory_held.py tests/gpu/test_planned_memory.py ;;
    rest) # whatever the parts above do not name
        named=$(grep -o 'tests/gpu/test_[a-z0-9_]*\.py' "$0" | sort -u)
        left=$(ls tests/gpu/test_*.py | grep -vxF "$named" || true)
        # shellcheck disable=SC2086
        [ -z "$left" ] || tests rest 180 $left
        ;;
    *) echo "no part $one" && exit 2 ;;
    esac
done
echo "== failed:${failed:- nothing}"
[ -z "$failed" ]

#!/usr/bin/env bash
# What only a machine with a GPU can show, in some 8 minutes, with a line of verdict for each part.
#
#   benchmarks/device.sh OUT [PYTHON]
#
# PYTHON has torch for CUDA, this package's dependencies with the extras `workflow`, `cuda` and `language`, pytest and timm; nothing is fetched.
# Logs and tables go to the folder OUT. Parts that passed there are not run again, so that a run that was cut off goes on.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} XDG_CACHE_HOME=$out/cache
failed=0

# part NAME SECONDS COMMAND...: run a part for at most so long.
part() {
  local name=$1 most=$2 began=$SECONDS
  shift 2
  if [[ -e $out/$name.passed ]]; then
    echo "$name: passed before"
    return
  fi
  if timeout "$most" "$@" >"$out/$name.log" 2>&1; then
    touch "$out/$name.passed"
    echo "$name: passed in $((SECONDS - began)) s"
  else
    failed=1
    echo "$name: FAILED after $((SECONDS - began)) s of at most $most; the last lines of $out/$name.log:"
    tail -n 5 "$out/$name.log"
  fi
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"
# Every kernel makes the definition's matrix, started as compiled here and as kept.
part kernels 150 "$python" -m pytest -p no:cacheprovider -q tests/projection/test_projection_cuda.py tests/projection/test_tensor_sketch.py tests/stages/test_device.py
features=("$python" benchmarks/large_models.py 124M --device cuda --no-vmap --no-memory --rounds 3)
part features_8 60 "${features[@]}" --samples 8 --kinds hadamard tensor_sketch --no-features --csv "$out/features_8.csv"
part features_64 60 "${features[@]}" --samples 64 --kinds hadamard tensor_sketch --csv "$out/features_64.csv"
part features_tf32 60 "${features[@]}" --samples 64 --kinds hadamard tensor_sketch --precision high --csv "$out/features_tf32.csv"
part features_bf16 60 "${features[@]}" --samples 64 --kinds hadamard tensor_sketch --dtype bfloat16 --csv "$out/features_bf16.csv"
part launches 60 "$python" benchmarks/launch_cost.py
# The second process finds the compiled kernel, and needs neither a compiler nor a test of the matrix.
part again 60 bash -c 'for n in 1 2; do "$0" -c "
import sys, time, torch
torch.zeros(1, device=\"cuda\")
from trak_core.projection import project
from trak_core.settings import ProjectionKind, ProjectionSpec
spec = ProjectionSpec(kind=ProjectionKind(\"rademacher\"), n_params=2000, proj_dim=512, seed=0, stream=0)
began = time.perf_counter()
project(torch.ones(8, 2000, device=\"cuda\"), spec)
torch.cuda.synchronize()
seconds, compiler = time.perf_counter() - began, \"numba.cuda\" in sys.modules
print(f\"process {sys.argv[1]}: the first call took {seconds:.2f} s, numba.cuda imported: {compiler}\")
assert sys.argv[1] == \"1\" or (seconds < 1 and not compiler)
" $n || exit 1; done' "$python"
part projection 120 "$python" benchmarks/projection.py --device cuda --repeats 3 --csv "$out/projection.csv"
part models 60 "$python" benchmarks/architectures.py coatnet_nano_rw_224 tiny_vit_5m_224 --device cuda
part smoke 120 "$python" -m trak_core.command.main run config/smoke.yaml --cores 8 --config 'compute={device: cuda}' "results=$out/smoke"
for name in features_8 features_64 features_tf32 features_bf16 launches again projection models; do
  echo "== $name"
  tail -n 40 "$out/$name.log"
done
exit $failed

#!/bin/bash
# Flux: flux batch examples/launch/flux_run.sh [program and its arguments]
# flux: --nodes=2 --exclusive
# flux: --time-limit=1h
set -euo pipefail

per_node=${RANKS_PER_NODE:-4}
cores=${CORES_PER_RANK:-8}
ranks=$(($(flux resource list -n -o '{nnodes}') * per_node))
# The interface that the MPI library speaks: pmix for Open MPI, cray-pals for Cray MPICH, simple for other MPICH.
interface=${FLUX_PMI:-pmix}
export OMP_NUM_THREADS=$cores
# Each rank gets its part of the node's cores and GPUs.
start=(flux run -n "$ranks" -c "$cores" -o pmi="$interface" -o cpu-affinity=per-task -o gpu-affinity=per-task)

"${start[@]}" python -m hvlike doctor
"${start[@]}" python "${@:-examples/digits.py}"

#!/bin/bash
# What stands between srun and a rank: it shows each rank one GPU, and sets the variables of torchrun.
#     srun ... examples/launch/select_gpu.sh python train.py
# SELECT_GPU is the variable that the driver reads: ROCR_VISIBLE_DEVICES for AMD, CUDA_VISIBLE_DEVICES for NVIDIA.
set -euo pipefail

export "${SELECT_GPU:-ROCR_VISIBLE_DEVICES}=$SLURM_LOCALID"
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
# The rank takes the place of this shell: signals reach it.
exec "$@"

#!/usr/bin/env bash
# tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [options of tools/train.py]: as in OpenMMLab's repositories.
# GPUS (8), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS are read from the environment, too.
# The configuration is checked here, the machine by the first task on every node. Five minutes before the time limit (NOTICE, in
# seconds) the ranks write a checkpoint and end with exit code 75; the same call goes on there.
set -euo pipefail
if [ $# -lt 4 ]; then
    sed -n '2,5s/^# //p' "$0" >&2
    exit 2
fi
partition=$1 job=$2 config=$3 work_dir=$4
gpus=${GPUS:-8} per_node=${GPUS_PER_NODE:-8}
if [ "$gpus" -lt "$per_node" ]; then per_node=$gpus; fi
tools=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
"$python" "$tools/check_config.py" "$config" --gpus "$gpus" >&2
export TRAIN_PYTHON=$python TRAIN_TOOLS=$tools TRAIN_CONFIG=$config TRAIN_DIR=$work_dir
# shellcheck disable=SC2016,SC2086
exec srun -p "$partition" --job-name="$job" --gres=gpu:"$per_node" --ntasks="$gpus" --ntasks-per-node="$per_node" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 --signal=USR1@"${NOTICE:-300}" ${SRUN_ARGS:-} \
    bash -c '
        if [ "$SLURM_LOCALID" = 0 ]; then
            "$TRAIN_PYTHON" "$TRAIN_TOOLS/doctor.py" "$TRAIN_CONFIG" --run-dir "$TRAIN_DIR" --only stack libraries system data >&2 ||
                [ $? = 1 ]
        fi || exit 2
        exec "$TRAIN_PYTHON" -u "$TRAIN_TOOLS/train.py" "$TRAIN_CONFIG" --run-dir "$TRAIN_DIR" --resume_from auto "$@"
    ' train "${@:5}"

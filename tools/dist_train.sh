#!/usr/bin/env bash
# tools/dist_train.sh CONFIG GPUS [options of tools/launch.py and tools/train.py]: as in OpenMMLab's repositories.
# The same as tools/launch.py start CONFIG -n GPUS --foreground. Several machines: one call on each, with NNODES, NODE_RANK,
# MASTER_ADDR and PORT set. On one machine no port is needed: every run gets a free one.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,4s/^# //p' "$0" >&2
    exit 2
fi
exec "${PYTHON:-python}" "$(dirname "$0")/launch.py" start "$1" -n "$2" --foreground "${@:3}"

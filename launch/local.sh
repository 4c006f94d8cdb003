#!/usr/bin/env bash
# Runs a script on this machine, one process per rank: on every GPU that torch sees, else on two CPU ranks.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/local.sh [SCRIPT] [ARGS...]

  SCRIPT   a Python file; without one, or when the first argument is an option, examples/train_lm.py

environment:
  NPROC    ranks; default: the GPUs that torch sees, 2 without any
  PYTHON   interpreter; default: the repository's .venv/bin/python, else python3
TEXT
}

die() {
  echo "launch/local.sh: $*" >&2
  exit 2
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

case ${1-} in
  -h | --help)
    usage
    exit 0
    ;;
  '' | -*) script=$root/examples/train_lm.py ;;
  *)
    script=$1
    shift
    ;;
esac
[[ -f $script ]] || die "no such script: $script"

python=${PYTHON:-}
if [[ -z $python ]]; then
  if [[ -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; else python=python3; fi
fi
command -v -- "$python" >/dev/null || die "no such interpreter: PYTHON=$python"

"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
  die "$python has no torch; 'make demo' installs one into .venv, or name another interpreter with PYTHON="
found=$("$python" -c '
import os, torch
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
print(torch.cuda.device_count() if torch.cuda.is_available() else 0, cores)')
read -r gpus cores <<<"$found"

ranks=${NPROC:-$((gpus > 0 ? gpus : 2))}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "NPROC=$ranks: must be a whole number above 0"
((gpus == 0 || ranks <= gpus)) ||
  die "NPROC=$ranks, but torch sees $gpus GPUs; set CUDA_VISIBLE_DEVICES= (empty) for CPU ranks"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if ((gpus == 0)) && [[ -z ${GLOO_SOCKET_IFNAME:-} ]]; then
  # gloo otherwise asks for the address of the host's name, which need not resolve on a laptop.
  if [[ $(uname -s) == Darwin ]]; then export GLOO_SOCKET_IFNAME=lo0; else export GLOO_SOCKET_IFNAME=lo; fi
fi

exec "$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$ranks" "$script" "$@"

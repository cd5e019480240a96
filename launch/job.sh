# What the batch scripts share. SLURM runs a copy of them, so this is found by RELAXQ_HOME or where sbatch was called.
# RELAXQ_HOME: the repository, by default the folder that sbatch was called in. RELAXQ_PYTHON: the interpreter,
# by default that of the repository's .venv, else python3.
set -euo pipefail

home=${RELAXQ_HOME:-$SLURM_SUBMIT_DIR}
python=$home/.venv/bin/python
[ -x "$python" ] || python=python3
python=${RELAXQ_PYTHON:-$python}
export PYTHONPATH="$home${PYTHONPATH:+:$PYTHONPATH}"

# Run `srun OPTIONS COMMAND`, one task a node, and end with its exit code. SIGTERM to this script reaches the tasks.
on_every_node() {
    srun --ntasks-per-node=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "$@" &
    local step=$! code=0
    # Not by way of srun: it does not pass SIGTERM on but kills its tasks.
    trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
    wait "$step" || code=$?
    # A signal that is trapped ends `wait`, not srun.
    while kill -0 "$step" 2>/dev/null; do
        code=0
        wait "$step" || code=$?
    done
    exit "$code"
}

# shellcheck shell=bash
# What the scripts that Slurm starts share: the settings, and launching every node. Sourced by them.

# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
MEGATRON=$ROOT/megatron_lm
SCRIPT=megatron_lm/$SCRIPT
# shellcheck source=megatron_lm/_00_conf.sh
. "$MEGATRON/_00_conf.sh"

# The folder of all logs, as a path that is right from everywhere.
case $LOG_DIR in
    /*) LOGS=$LOG_DIR ;;
    ../*) LOGS=$ROOT/${LOG_DIR#../} ;;
    *) LOGS=$MEGATRON/$LOG_DIR ;;
esac

uses_container() {
    [ -n "$CONTAINER_IMAGE_PATH" ] && command -v enroot >/dev/null
}

# The interpreter to use: $PYTHON if it is set, else the project's environment. Where a container
# trains, the system's Python will do for what is outside.
choose_python() {
    if [ -z "${PYTHON:-}" ]; then
        if uses_container; then PYTHON=python3; else use_environment megatron; fi
    fi
    export PYTHON PYTHONUNBUFFERED=1
}

# sbatch_header NAME NODES QUEUE: the #SBATCH lines of one job, from the settings.
sbatch_header() {
    printf '#SBATCH --job-name=%s\n' "$1"
    printf '#SBATCH --nodes=%s\n' "$2"
    [ -z "$3" ] || printf '#SBATCH --partition=%s\n' "$3"
    [ -z "$GRES" ] || printf '#SBATCH --gres=%s\n' "$GRES"
    printf '#SBATCH --ntasks-per-node=1\n'
    printf '#SBATCH --cpus-per-task=%s\n' "$CPUS_PER_TASK"
    printf '#SBATCH --output=%s/slurm-%%j.out\n' "$LOGS"
}

# address_of NODELIST: where the first node of a Slurm node list answers.
address_of() {
    local first address
    first=$(scontrol show hostnames "$1" | head -n 1)
    # NodeAddr and not the name: a node's name need not resolve.
    address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    [ -n "$address" ] || die "Slurm knows no address of node '$first': see scontrol show node $first"
    printf '%s\n' "$address"
}

# launch_nodes FIRST_RANK MASTER_ADDR [srun options]: slurm/node.sh once on each node of this job.
launch_nodes() {
    local first=$1 address=$2
    shift 2
    # srun takes no --cpus-per-task from the job since Slurm 22.05.
    supervise srun "$@" --ntasks-per-node=1 --cpus-per-task="$CPUS_PER_TASK" --kill-on-bad-exit=1 \
        "$MEGATRON/slurm/node.sh" "$first" "$address"
}

in_slurm() {
    [ -n "${SLURM_JOB_ID:-}" ] || die "this is the body of a Slurm job: submit it by megatron_lm/_03_submit.sh"
}

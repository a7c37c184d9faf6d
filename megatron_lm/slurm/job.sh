# shellcheck shell=bash
# What the scripts that launch nodes share: the settings, and how all nodes of a job are started. Sourced.

# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
MEGATRON=$ROOT/megatron_lm
SCRIPT=megatron_lm/$SCRIPT
if [ -z "${SETTINGS_PYTHON:-}" ]; then
    SETTINGS_PYTHON=$(find_python) || die "Python 3.10 or newer is needed and none is on the PATH"
fi
export SETTINGS_PYTHON
# Known only here: below, every setting has a value.
export PORT_BY_HAND="${PORT_BY_HAND-${MEGATRON_MASTER_PORT:-}}"
# shellcheck source=megatron_lm/_00_conf.sh
. "$MEGATRON/_00_conf.sh"
# A path that _00_conf.sh gives by default starts at its folder.
case $LOG_DIR in
    /*) ;;
    *)
        LOG_DIR=$MEGATRON/$LOG_DIR
        export MEGATRON_LOG_DIR=$LOG_DIR
        ;;
esac

uses_container() { [ -n "$CONTAINER_IMAGE_PATH" ]; }

# The interpreter to use: $PYTHON if it is set, else the project's environment. If the ranks train in a
# container, any Python does for what runs outside of it.
choose_python() {
    if [ -z "${PYTHON:-}" ]; then
        if uses_container; then PYTHON=$SETTINGS_PYTHON; else use_environment megatron; fi
    fi
    export PYTHON PYTHONUNBUFFERED=1
}

# address_of NODE: where a Slurm node can be reached.
address_of() {
    local address
    # NodeAddr and not the name, because a node's name need not resolve.
    address=$(scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    [ -n "$address" ] || die "Slurm has no address of node '$1': see scontrol show node $1"
    printf '%s\n' "$address"
}

# master_of NODELIST_OF_THE_JOB: the address of the node that has rank 0.
master_of() {
    local first=${NODELIST%%,*}
    [ -n "$first" ] || first=$(scontrol show hostnames "$1" | head -n 1)
    address_of "$first"
}

# launch_nodes FIRST_RANK MASTER_ADDR [options of srun]: slurm/node.sh once on each node of this job.
launch_nodes() {
    local first=$1 address=$2
    shift 2
    # Since Slurm 22.05, srun does not take --cpus-per-task from the job.
    supervise srun "$@" --ntasks-per-node=1 --cpus-per-task="$CPUS_PER_TASK" --kill-on-bad-exit=1 \
        "$MEGATRON/slurm/node.sh" "$first" "$address"
}

in_slurm() {
    [ -n "${SLURM_JOB_ID:-}" ] || die "this is the body of a Slurm job: submit it with megatron_lm/_03_submit.sh"
}

#!/usr/bin/env bash
# Submit a run with the settings of _00_conf.sh; prints the job ids.
#
# Usage: megatron_lm/_03_submit.sh [--het] [--local] [--dry-run]
#
# A homogeneous cluster gets one job; a heterogeneous one (HOMOGENEOUS_CLUSTER=false) two, the second told
# where the first one's master is. The headers come from the settings, the master's address from Slurm.
#
#   --het      heterogeneous: one true Slurm het job instead of two jobs
#   --local    no Slurm: all WORLD_SIZE ranks on this machine, and wait for them
#   --dry-run  print what would be submitted, and submit nothing
#
# Logs: $LOG_DIR/<job id>/<node>.out, .err and .gpu (LOG_DIR: ../log2), watched by get_result.sh.
# Example: MODEL=tiny megatron_lm/_03_submit.sh --local

set -euo pipefail
# shellcheck source=megatron_lm/slurm/job.sh
. "$(dirname "${BASH_SOURCE[0]}")/slurm/job.sh"

het=false local=false dry_run=false
for argument in "$@"; do
    case $argument in
        -h | --help) show_help ;;
        --het) het=true ;;
        --local) local=true ;;
        --dry-run | --dry_run) dry_run=true ;;
        *) usage_error "unknown option '$argument'" ;;
    esac
done
[ "$het" = false ] || [ "$local" = false ] || usage_error "--het and --local exclude each other"
[ "$het" = false ] || [ "$HOMOGENEOUS_CLUSTER" = false ] ||
    usage_error "--het is for a heterogeneous cluster: set HOMOGENEOUS_CLUSTER=false"
name=gpt2_$MODEL

# script_of BODY HEADER…: what is given to sbatch.
script_of() {
    local body=$1
    shift
    printf '#!/usr/bin/env bash\n'
    printf '%s\n' "$@"
    printf 'exec %q\n' "$MEGATRON/$body"
}

# submit SCRIPT [sbatch options]: set ID; in a dry run, show both.
submit() {
    local script=$1
    shift
    if "$dry_run"; then
        printf '%s\n' "# sbatch --parsable${*:+ $*}" "$script" ""
        ID='<master job id>'
        return
    fi
    ID=$(sbatch --parsable "$@" <<<"$script") || die "sbatch refused the job; its message is above"
    ID=${ID%%;*}
}

# together ID…: let get_result.sh show these jobs as one run.
together() {
    "$dry_run" && return
    local id
    for id in "$@"; do
        mkdir -p "$LOGS/$id"
        printf '%s\n' "$@" >"$LOGS/$id/jobs"
    done
}

if "$local"; then
    HOMOGENEOUS_CLUSTER=true NPROC_PER_NODE=$WORLD_SIZE NNODES=1 RUN_ID=local-$(date +%Y%m%d-%H%M%S)-$$
    export HOMOGENEOUS_CLUSTER NPROC_PER_NODE NNODES RUN_ID
    if "$dry_run"; then
        say "$MEGATRON/slurm/node.sh 0 127.0.0.1    # $NPROC_PER_NODE ranks, logs in $LOGS/$RUN_ID"
        exit
    fi
    choose_python
    mkdir -p "$LOGS/$RUN_ID"
    say "$RUN_ID"
    say "logs: $LOGS/$RUN_ID; watch: megatron_lm/get_result.sh $RUN_ID" >&2
    status=0
    supervise "$MEGATRON/slurm/node.sh" 0 127.0.0.1 || status=$?
    [ "$status" = 0 ] || die "the run failed with status $status: see megatron_lm/get_result.sh $RUN_ID" "$status"
    exit
fi

"$dry_run" || command -v sbatch >/dev/null ||
    die "sbatch is not there: run on a Slurm cluster, start one by megatron_lm/slurm/local_cluster.sh up, or use --local"
"$dry_run" || mkdir -p "$LOGS"
unset RUN_ID
if [ "$HOMOGENEOUS_CLUSTER" = true ]; then
    submit "$(script_of _02_homo_job.sh "$(sbatch_header "$name" "$NNODES" "$SLURM_QUEUE")")"
    together "$ID"
    "$dry_run" || say "$ID"
    exit
fi

master_header=$(sbatch_header "$name" "$MASTER_NNODES" "$MASTER_QUEUE")
slave_header=$(sbatch_header "$name" "$((NNODES - MASTER_NNODES))" "$SLAVE_QUEUE")
if "$het"; then
    submit "$(script_of _02_hetero_master_job.sh "$master_header" "#SBATCH hetjob" "$slave_header")"
    together "$ID"
    "$dry_run" || say "$ID"
    exit
fi
submit "$(script_of _02_hetero_master_job.sh "$master_header")"
master=$ID
submit "$(script_of _02_hetero_slave_job.sh "$slave_header")" \
    "--dependency=after:$master" "--export=ALL,MASTER_JOB_ID=$master"
together "$master" "$ID"
"$dry_run" || printf '%s\n' "$master" "$ID"

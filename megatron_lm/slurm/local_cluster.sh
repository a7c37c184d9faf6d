#!/usr/bin/env bash
# A real Slurm of several virtual nodes on this machine, for tests and for learning.
#
# Usage: megatron_lm/slurm/local_cluster.sh up|down [NODES=4]
#
# Needs Debian's packages (apt-get install slurm-wlm munge) and no root: munge and Slurm run as the
# caller and write only to $LOCAL_CLUSTER (default: /tmp/local-slurm-<user id>). "up" prints the one
# line with which sbatch, squeue and the others use this cluster:
#
#   eval "$(megatron_lm/slurm/local_cluster.sh up 4)"
#   sbatch --nodes 2 --wrap 'srun hostname'; squeue
#   megatron_lm/slurm/local_cluster.sh down
#
# Queues: "all" (the default), "first" (node n1) and "rest" (the others), as for two kinds of GPU, and
# "urgent", whose jobs preempt those of "all". Each node has 8 virtual GPUs (--gres), which are only
# counted. A job that uses more memory than its --mem is killed. "down" ends all jobs and daemons and
# removes the folder.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
SCRIPT=megatron_lm/slurm/local_cluster.sh
PATH=$PATH:/usr/sbin:/sbin
FOLDER=${LOCAL_CLUSTER:-/tmp/local-slurm-$(id -u)}
SECONDS_TO_START=60

write_conf() {
    local nodes=$1 host user rest
    host=$(hostname -s)
    user=$(id -un)
    rest="n[2-$nodes]"
    [ "$nodes" -gt 2 ] || rest="n$nodes"
    cat >"$FOLDER/slurm.conf" <<END
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket
CryptoType=crypto/munge
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/%n
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd.%n.pid
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/slurmd.%n.log
# No cgroups: a plain user may not make them, and a container has none.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
# Only the backfill scheduler starts het jobs, by default every 30 s.
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
JobCompType=jobcomp/filetxt
JobCompLoc=$FOLDER/finished_jobs
ReturnToService=2
KillWait=5
MpiDefault=none
GresTypes=gpu
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + 1))-$((PORT + nodes)) CPUs=16 RealMemory=65536 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP
PartitionName=first Nodes=n1 MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP
PartitionName=urgent Nodes=n[1-$nodes] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP
PartitionName=rest Nodes=$rest MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP
END
    # Slurm counts GPUs by their device files, for which empty files will do.
    touch "$FOLDER"/gpu{0..7}
    printf 'NodeName=n[1-%s] Name=gpu File=%s/gpu[0-7]\n' "$nodes" "$FOLDER" >"$FOLDER/gres.conf"
}

# A block of free ports: the controller's and one for each node.
find_ports() {
    local tries port
    for tries in $(seq 100); do
        PORT=$((20000 + (RANDOM + tries) % 10000))
        for port in $(seq "$PORT" $((PORT + $1))); do
            if (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then continue 2; fi
        done
        return
    done
    die "there is no free block of $(($1 + 1)) ports from 20000 to 30000"
}

up() {
    local nodes=$1 name tries
    for name in munged slurmctld slurmd sbatch srun; do
        command -v "$name" >/dev/null || die "$name is not installed: apt-get install slurm-wlm munge"
    done
    if [ -e "$FOLDER" ]; then
        die "$FOLDER exists already: a cluster is up, or an earlier one was not taken down; run $SCRIPT down"
    fi
    trap 'down; exit 1' ERR
    mkdir -p "$(dirname "$FOLDER")"
    mkdir -m 700 "$FOLDER" "$FOLDER/state"
    (
        umask 077
        head -c 1024 /dev/urandom >"$FOLDER/munge.key"
    )
    find_ports "$nodes"
    write_conf "$nodes"
    # Without --force munged refuses to run as root.
    munged --force --socket "$FOLDER/munge.socket" --key-file "$FOLDER/munge.key" --num-threads 2 \
        --pid-file "$FOLDER/munged.pid" --log-file "$FOLDER/munged.log" --seed-file "$FOLDER/munged.seed" \
        2>"$FOLDER/munged.err" || die_down "munged does not start: $(tail -n 1 "$FOLDER/munged.err")"
    export SLURM_CONF=$FOLDER/slurm.conf
    slurmctld -c || die_down "slurmctld does not start: $(tail -n 1 "$FOLDER/slurmctld.log")"
    for name in $(seq "$nodes"); do
        mkdir -p "$FOLDER/n$name"
        slurmd -N "n$name" || die_down "slurmd does not start: $(tail -n 1 "$FOLDER/slurmd.n$name.log")"
    done
    for tries in $(seq $((SECONDS_TO_START * 5))); do
        # Whole words only: "idle*" does not respond.
        if [ "$(sinfo -h -p all -N -o '%T' 2>/dev/null | grep -cx idle)" = "$nodes" ]; then
            printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"
            return
        fi
        sleep 0.2
    done
    die_down "after $SECONDS_TO_START s not all of $nodes nodes are idle (tried $tries times): $(tail -n 1 "$FOLDER/slurmctld.log")"
}

die_down() {
    local why=$1
    down
    die "$why"
}

down() {
    local file pid tries left
    trap - ERR
    [ -d "$FOLDER" ] || return 0
    if [ -s "$FOLDER/slurmctld.pid" ]; then
        export SLURM_CONF=$FOLDER/slurm.conf
        timeout 10 scancel --user "$(id -un)" 2>/dev/null || true
        for tries in $(seq 100); do
            [ -n "$(timeout 10 squeue -h 2>/dev/null)" ] || break
            sleep 0.2
        done
    fi
    left=()
    for file in "$FOLDER"/slurmd.*.pid "$FOLDER/slurmctld.pid" "$FOLDER/munged.pid"; do
        [ -s "$file" ] || continue
        pid=$(cat "$file")
        if kill "$pid" 2>/dev/null; then left+=("$pid"); fi
    done
    for pid in ${left[@]+"${left[@]}"}; do
        for tries in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            [ "$tries" -lt 90 ] || kill -KILL "$pid" 2>/dev/null || true
            sleep 0.1
        done
    done
    rm -rf "$FOLDER"
}

case ${1:-} in
    -h | --help) show_help ;;
    up)
        is_count "${2:-4}" && [ "${2:-4}" -ge 2 ] && [ "${2:-4}" -le 64 ] || usage_error "give 2 to 64 nodes, not '${2:-}'"
        up "${2:-4}"
        ;;
    down) down ;;
    *) usage_error "give up or down" ;;
esac

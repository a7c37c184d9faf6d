"""What known messages mean, as data: a pattern, and the sentence into which the pattern's groups go.

Patterns match what stays the same over versions: names of exceptions, result codes, Slurm's phrases.
Earlier rules are more specific and win over later ones of the same weight.
"""

from __future__ import annotations

import errno
import re
import signal
from dataclasses import dataclass

from megatron_lm.diagnosis.statements import Kind

# How well a statement shows where a failure began. WEAK: the process may have gone on. PEER: another process
# went away or did not answer.
PRIMARY, WEAK, PEER = range(3)
MESSAGES = (Kind.TOOL, Kind.RECORD, Kind.EXCEPTION)
SLURM = (Kind.SLURM,)


@dataclass(frozen=True)
class Rule:
    """pattern: searched in "name: text" of statements of these kinds (none: of all kinds)."""

    pattern: re.Pattern[str]
    sentence: str
    weight: int
    kinds: tuple[Kind, ...]


def _rule(pattern: str, sentence: str, weight: int = PRIMARY, kinds: tuple[Kind, ...] = ()) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), sentence, weight, kinds)


_OF_SLURM = [
    _rule(r"nodes? (?P<node>\S+) not responding", "node {node} did not respond", kinds=SLURM),
    _rule(r"Node failure on (?P<node>\S+)", "node {node} failed", kinds=SLURM),
    _rule(
        r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO NODE FAILURE",
        "a node of the job failed",
        kinds=SLURM,
    ),
    _rule(
        r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO TIME LIMIT",
        "the job reached its time limit",
        kinds=SLURM,
    ),
    _rule(
        r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO PREEMPTION",
        "the job was preempted by another job",
        kinds=SLURM,
    ),
    _rule(r"DUE TO JOB REQUEUE", "the job was requeued", PEER, SLURM),
    _rule(
        r"JOB \d+ ON \S+ CANCELLED AT \S+ (?:DUE TO SIGNAL \w+ )?\*\*\*", "the job was cancelled", kinds=SLURM
    ),
    _rule(r"CANCELLED AT", "Slurm ended the job step", PEER, SLURM),
    _rule(
        r"oom[-_ ]kill|out[- ]of[- ]memory|exceeded (?:job |step )?memory limit|memory limit .*exceeded",
        "the job used more memory than it was given, and its processes were killed",
        kinds=SLURM,
    ),
    _rule(r"pyxis: {3,}(?P<what>.*\S)", "the container could not be started: {what}", kinds=SLURM),
    _rule(r"pyxis: (?P<what>.*)", "the container could not be started: {what}", WEAK, SLURM),
    _rule(
        r"Task launch for \S+ failed on node (?P<node>\S+): (?P<why>.*)",
        "Slurm could not start the task on node {node}: {why}",
        kinds=SLURM,
    ),
    _rule(
        r"(?P<node>\S+): tasks? [\d,-]+: Out Of Memory",
        "the job used more memory on {node} than it was given",
        kinds=SLURM,
    ),
    _rule(
        r"(?P<node>\S+): tasks? [\d,-]+: (?P<how>Segmentation fault|Bus error|Aborted)",
        "a process on {node} ended by: {how}",
        WEAK,
        SLURM,
    ),
    _rule(
        r"(?P<node>\S+): tasks? [\d,-]+: Exited with exit code (?P<code>\d+)",
        "a task on {node} ended with exit code {code}",
        PEER,
        SLURM,
    ),
    _rule(
        r"tasks? [\d,-]+: (?:Exited|Terminated|Killed|running)",
        "Slurm ended the tasks of the step",
        PEER,
        SLURM,
    ),
    _rule(r"execve\(\): (?P<what>.*)", "a program could not be started: {what}", WEAK, SLURM),
]
_OF_MEMORY = [
    _rule(
        r"Tried to allocate (?P<size>[\d.]+ \w+)\. GPU.*?total capacity of (?P<total>[\d.]+ \w+) of which "
        r"(?P<free>[\d.]+ \w+) is free",
        "its GPU ran out of memory: it asked for {size}, {free} of {total} were free",
    ),
    _rule(
        r"Tried to allocate (?P<size>[\d.]+ \w+) \(GPU \d+; (?P<total>[\d.]+ \w+) total capacity;.*? "
        r"(?P<free>[\d.]+ \w+) free",
        "its GPU ran out of memory: it asked for {size}, {free} of {total} were free",
    ),
    _rule(
        r"out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)",
        "its GPU ran out of memory: it asked for {size}",
    ),
    _rule(
        r"(?:CUDA|HIP|NCCL|cuBLAS|cuDNN).*out of memory|OutOfMemoryError|STATUS_ALLOC_FAILED"
        r"|cudaErrorMemoryAllocation",
        "its GPU ran out of memory",
    ),
    _rule(
        r"can't allocate memory: you tried to allocate (?P<size>\d+) bytes",
        "its node ran out of memory: it asked for {size} bytes",
    ),
    _rule(
        r"^MemoryError|bad_alloc|Out of memory: Killed process|cgroup out of memory",
        "its node ran out of memory",
    ),
    _rule(
        r"DataLoader worker.*(?:bus error|shared memory)|insufficient shared memory",
        "a data loader ran out of shared memory (/dev/shm)",
    ),
    _rule(
        r"DataLoader worker.*(?:killed by signal|exited unexpectedly)",
        "a process of its data loader was killed",
        WEAK,
    ),
]
_OF_THE_STORE = [
    _rule(
        r"store based barrier on rank: \d+.*world_size=(?P<all>\d+), worker_count=(?P<joined>\d+), "
        r"timeout=(?P<time>[\d:]+)",
        "only {joined} of {all} processes joined within {time}",
        PEER,
    ),
    _rule(
        r"port: (?P<port>\d+).*EADDRINUSE",
        "the master's port {port} is already in use; set MASTER_PORT to a free one",
    ),
    _rule(
        r"\[::\]:(?P<port>\d+).*Address already in use",
        "port {port} is already in use; set MASTER_PORT to a free one",
    ),
    _rule(
        r"EADDRINUSE|Address already in use",
        "the master's port is already in use; set MASTER_PORT to a free one",
    ),
    _rule(
        r"Timed out after (?P<time>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<all>\d+) "
        r"clients joined",
        "only {joined} of {all} processes joined within {time} s",
        WEAK,
    ),
    _rule(
        r"\((?P<host>[^,() ]+), \d+\).*(?:Name or service not known|failure in name resolution)",
        "the name {host} could not be resolved",
    ),
    _rule(
        r"Name or service not known|failure in name resolution|could not be resolved",
        "a host name could not be resolved",
    ),
    _rule(
        r"client socket has timed out after (?P<time>\w+) while trying to connect to \(?(?P<host>[^,) "
        r"]+), (?P<port>\d+)",
        "it could not reach the master at {host}, port {port}, within {time}",
        PEER,
    ),
    _rule(
        r"client socket has failed to connect to any network address of \((?P<host>[^,]+), (?P<port>\d+)\)",
        "it could not reach the master at {host}, port {port}",
        PEER,
    ),
    _rule(
        r"wait timeout after (?P<time>\w+), keys: (?P<keys>[^,\s]+)",
        "it waited {time} for another rank at the store (key {keys})",
        PEER,
    ),
    _rule(
        r"RendezvousConnectionError|connection to the C10d store has failed",
        "it could not reach the master's store",
        PEER,
    ),
    _rule(r"Rendezvous\w*Error|rendezvous.*tim(?:ed )?out", "the nodes did not all join in time", PEER),
    _rule(
        r"store->get\(|failed to recv, got 0 bytes|Failed to (?:recv|send).*TCPStore|DistStoreError"
        r"|DistNetworkError|Socket Timeout",
        "the store on the master went away or did not answer",
        PEER,
    ),
]
_OF_COLLECTIVES = [
    _rule(
        r"ranks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier in (?P<time>\d+ ms)",
        "rank {ranks} did not reach a barrier within {time}",
    ),
    _rule(
        r"WorkNCCL\(.*?SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+).*?ran for (?P<time>\d+) milliseconds",
        "its collective {op} (number {seq}) waited {time} ms for other ranks",
        PEER,
    ),
    _rule(
        r"collective operation timeout|operations have failed or timed out|Timeout at NCCL work"
        r"|detected by watchdog|collective timeout|watchdog thread terminated",
        "a collective waited too long for other ranks",
        PEER,
    ),
    _rule(
        r"watchdog got stuck for (?P<time>\d+ \w+)",
        "NCCL's watchdog hung for {time}, as when a GPU or its driver hangs",
        WEAK,
    ),
    _rule(
        r"Timed out waiting (?P<time>\d+ ?ms) for (?P<op>\w+) operation",
        "its {op} waited {time} for another rank",
        PEER,
    ),
    _rule(
        r"Duplicate GPU detected ?: rank (?P<a>\d+) and rank (?P<b>\d+)", "ranks {a} and {b} use the same GPU"
    ),
    _rule(
        r"ncclRemoteError|remote process exit|Connection (?:closed|reset) by peer|Broken pipe",
        "its connection to another rank was closed",
        PEER,
    ),
    _rule(r"ncclInvalidUsage|ncclInvalidArgument", "NCCL was used wrongly: {last}"),
    _rule(r"ncclUnhandledCudaError|unhandled cuda error", "a CUDA call of NCCL failed: {last}"),
    _rule(r"ncclSystemError|unhandled system error", "a system or network call of NCCL failed: {last}", WEAK),
    _rule(r"ncclInternalError|internal error", "NCCL met an internal error: {last}", WEAK),
]
_OF_GPUS = [
    _rule(r"\bXid\b[^:]*(?:\([^)]*\))?: (?P<number>\d+)", "the GPU driver reported Xid {number}"),
    _rule(r"uncorrectable ECC error", "its GPU has an uncorrectable memory (ECC) error; exclude the node"),
    _rule(r"illegal memory access", "a GPU kernel accessed memory illegally"),
    _rule(r"device-side assert", "an assertion failed in a GPU kernel, as for an index out of range"),
    _rule(r"no kernel image is available", "its PyTorch was not built for this GPU"),
    _rule(
        r"driver version is insufficient|driver on your system is too old",
        "the GPU driver is too old for its CUDA",
    ),
    _rule(
        r"No CUDA GPUs are available|no CUDA-capable device|invalid device ordinal|but it has \d+ GPU\(s\)",
        "there is no GPU for it",
    ),
    _rule(
        r"CUDA (?:driver )?error: (?P<what>.*?)(?: CUDA kernel errors| Exception raised|\.|$)",
        "its GPU failed: {what}",
    ),
    _rule(r"(?P<what>(?:CUBLAS|CUDNN|CUSOLVER|CUFFT)_STATUS_\w+)", "a GPU library failed: {what}"),
]
_OF_PROGRAMS = [
    _rule(
        r"PytorchStreamWriter failed|inline_container.*unexpected pos|file write failed|iostream error",
        "a checkpoint could not be written in full, as on a full disk",
    ),
    _rule(
        r"(?:CONTAINER_IMAGE_PATH|\.sqsh|\.sqfs|squashfs).*(?:no (?:such )?file|not found"
        r"|does not exist)|No such file or directory: \S+\.sqsh",
        "the container image was not found: {text}",
        kinds=MESSAGES,
    ),
    _rule(
        r"URL \S+ returned error code: (?P<what>.*)|(?P<manifest>manifest unknown.*)",
        "the container image was not found: {what}{manifest}",
        kinds=MESSAGES,
    ),
    _rule(r"^(?P<what>enroot\S*: .*)", "the container could not be started: {what}", kinds=MESSAGES),
    _rule(
        r"^(?P<what>nvidia-container-cli: .*)", "the container could not be started: {what}", kinds=MESSAGES
    ),
    _rule(r"(?:^|\s)(?P<program>[^\s:]+): command not found", "{program} is not installed", kinds=MESSAGES),
    _rule(r"ModuleNotFoundError: No module named '?(?P<name>[\w.]+)", "its Python has no module {name}"),
    # The first rank's sentence, repeated by the others; see utils' watch over the ranks.
    _rule(r"rank \d+ stops: (?P<why>.*)", "it was stopped, because {why}", PEER, MESSAGES),
    _rule(r"rank \d+: interrupted$|^KeyboardInterrupt", "it was interrupted", PEER, MESSAGES),
    _rule(r"SignalException.*got signal: (?P<number>\d+)", "torchrun was ended by signal {number}", PEER),
    _rule(r"ChildFailedError", "one of its ranks failed", PEER),
]
RULES = [*_OF_SLURM, *_OF_MEMORY, *_OF_THE_STORE, *_OF_GPUS, *_OF_COLLECTIVES, *_OF_PROGRAMS]

PEER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OF_SIGNAL = {
    signal.SIGKILL: "it was killed (SIGKILL), as the kernel does when memory runs out",
    signal.SIGSEGV: "it crashed with a segmentation fault (SIGSEGV)",
    signal.SIGBUS: "it crashed with a bus error (SIGBUS), as when shared memory runs out",
    signal.SIGABRT: "it aborted (SIGABRT)",
    signal.SIGILL: "it crashed with an illegal instruction (SIGILL)",
    signal.SIGFPE: "it crashed with an arithmetic error (SIGFPE)",
}
OF_ERRNO = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission was denied",
    errno.EPERM: "an operation is not permitted",
    errno.ENOENT: "a file does not exist",
    errno.EIO: "the file system failed (I/O error)",
    errno.ESTALE: "the network file system lost a file (stale file handle)",
    errno.ESHUTDOWN: "the file system's server (Lustre) cut the connection",
    errno.ENOTCONN: "the file system's server (Lustre) is not connected",
    errno.EROFS: "the file system is read-only",
    errno.ENOMEM: "its node ran out of memory",
    errno.EAGAIN: "a limit on processes or other resources was reached",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open",
    errno.ECONNREFUSED: "nothing listens at the address it connected to",
    errno.ECONNRESET: "its connection to another process was closed",
    errno.EPIPE: "the process that it wrote to went away",
    errno.ETIMEDOUT: "a connection timed out",
    errno.EHOSTUNREACH: "a host could not be reached",
    errno.ENETUNREACH: "a network could not be reached",
}
PEER_ERRNOS = (errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED, errno.ETIMEDOUT)

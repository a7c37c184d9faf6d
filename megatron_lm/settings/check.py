"""The rules that settings must keep, checked before anything starts."""

from __future__ import annotations

from dataclasses import fields

from megatron_lm.errors import RunError
from megatron_lm.settings.values import MODELS, NORMALIZATIONS, POSITIONS, Settings

CHOICES = {
    "model": tuple(MODELS),
    "precision": ("fp16", "bf16", "fp32"),
    "recompute": ("none", "selective", "full"),
    "attention": ("unfused", "flash"),
    "normalization": ("", *NORMALIZATIONS),
    "position": ("", *POSITIONS),
    "report_to": ("", "tensorboard", "wandb"),
}
# Of the whole numbers; all others are at least 1.
MAY_BE_ZERO = ("seed", "stop_on_nan", "save_interval", "master_port")


def check(settings: Settings) -> None:
    """Raise ``RunError`` if the settings do not fit together, with what would fit."""
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            raise RunError(f"{name.upper()}={value}: choose from {', '.join(filter(None, choices))}.")
    for name in (field.name for field in fields(settings) if field.name not in MAY_BE_ZERO):
        value = getattr(settings, name)
        if type(value) is int and value < 1:
            raise RunError(f"{name.upper()}={value}: give at least 1.")
    if not 1 <= settings.master_port <= 65_535:
        raise RunError(f"MASTER_PORT={settings.master_port}: give a port from 1 to 65535.")
    if not (0 < settings.lr < 1 and 0 <= settings.lr_warmup_fraction < 1):
        raise RunError(
            f"LR={settings.lr:g}, LR_WARMUP_FRACTION={settings.lr_warmup_fraction:g}: give values "
            "between 0 and 1."
        )
    launched = settings.nproc_per_node * settings.nnodes
    if settings.world_size != launched:
        raise RunError(
            f"WORLD_SIZE={settings.world_size}: NPROC_PER_NODE × NNODES = {settings.nproc_per_node} × "
            f"{settings.nnodes} = {launched}; leave WORLD_SIZE out, or set it to {launched}."
        )
    dp, tensor, pipeline = settings.dp_size, settings.tensor_mp_size, settings.pipeline_mp_size
    if dp * tensor * pipeline != settings.world_size:
        rest, over = divmod(settings.world_size, tensor * pipeline)
        product = f"TENSOR_MP_SIZE × PIPELINE_MP_SIZE = {tensor * pipeline}"
        fit = f"{product} does not divide it" if over else f"DP_SIZE={rest} would fit"
        raise RunError(
            f"WORLD_SIZE={settings.world_size} is not DP_SIZE × TENSOR_MP_SIZE × PIPELINE_MP_SIZE = {dp} × "
            f"{tensor} × {pipeline} = {dp * tensor * pipeline}; {fit}."
        )
    _check_partition(settings)
    _check_tensor_parallelism(settings)
    _check_batch(settings)
    if settings.attention == "flash" and settings.precision == "fp32":
        raise RunError(
            "ATTENTION=flash: GPUs have no such kernel for PRECISION=fp32; give fp16 or bf16, or "
            "ATTENTION=unfused."
        )
    try:
        shares = [float(part) for part in settings.split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or min(shares) < 0 or not shares[0]:
        raise RunError(
            f"SPLIT={settings.split}: give the shares of training, validation and test data, such as 100,0,0."
        )
    if not settings.homogeneous_cluster and not settings.master_nnodes < settings.nnodes:
        raise RunError(
            f"MASTER_NNODES={settings.master_nnodes}: must be below NNODES ({settings.nnodes}), because "
            "the slave job gets the remaining nodes; give 1, and NNODES of at least 2."
        )


def _check_partition(settings: Settings) -> None:
    stages, chunks = settings.pipeline_mp_size, settings.virtual_stages
    layers, parts = settings.size.layers, settings.partition.split("-")
    many = stages * chunks
    even = [layers // many + (at < layers % many) for at in range(many)]
    fit = "-".join(map(str, even)) + " would fit"
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise RunError(f"PARTITION={settings.partition}: give the layers of each stage; {fit}.")
    if chunks > 1 and stages == 1:
        raise RunError(f"VIRTUAL_STAGES={chunks}: needs PIPELINE_MP_SIZE of at least 2.")
    if len(parts) not in (stages, many):
        wanted = f"PIPELINE_MP_SIZE is {stages}" + (f", × VIRTUAL_STAGES = {many}" if chunks > 1 else "")
        raise RunError(f"PARTITION={settings.partition} has {len(parts)} stages, {wanted}; {fit}.")
    if sum(settings.parts) != layers:
        raise RunError(
            f"PARTITION={settings.partition} adds up to {sum(settings.parts)} layers, model "
            f"{settings.model} has {layers}; {fit}."
        )
    if len(parts) == stages < many and any(part % chunks for part in settings.parts):
        raise RunError(
            f"PARTITION={settings.partition}: VIRTUAL_STAGES={chunks} does not divide each stage's "
            f"layers; name all {many} chunks, or change the partition; {fit}."
        )
    if 0 in settings.layers[1:-1]:
        stage = settings.layers.index(0, 1)
        raise RunError(
            f"PARTITION={settings.partition}: stage {stage} has no layers; only the first stage, which "
            f"has the embedding, and the last, which has the loss, can have none; {fit}."
        )


def _check_tensor_parallelism(settings: Settings) -> None:
    size, tensor = settings.size, settings.tensor_mp_size
    if size.hidden % size.heads:
        raise RunError(
            f"NUM_HEADS={size.heads}: does not divide HIDDEN_SIZE={size.hidden}; "
            f"{_divisors(size.hidden, size.heads)} would."
        )
    if size.position == "rope" and size.hidden // size.heads % 2:
        raise RunError(
            "POSITION=rope: needs heads of even width, HIDDEN_SIZE / NUM_HEADS is "
            f"{size.hidden // size.heads}."
        )
    if size.heads % size.kv_groups:
        raise RunError(
            f"KV_GROUPS={size.kv_groups}: does not divide NUM_HEADS={size.heads}; "
            f"{_divisors(size.heads)} would."
        )
    for name, number, what in (
        ("NUM_HEADS", size.heads, "attention heads"),
        ("KV_GROUPS", size.kv_groups, "key-value groups"),
        ("FFN", size.ffn, "columns of the MLP"),
        ("VOCAB_SIZE", settings.padded_vocabulary, "rows of the embedding"),
    ):
        if number % tensor:
            raise RunError(
                f"TENSOR_MP_SIZE={tensor}: can't share {number} {what} ({name}); {_divisors(number, 64)} fit."
            )
    if settings.sequence_parallel and tensor == 1:
        raise RunError("SEQUENCE_PARALLEL=true: needs TENSOR_MP_SIZE of at least 2.")
    if settings.sequence_parallel and size.sequence % tensor:
        raise RunError(
            f"SEQUENCE_PARALLEL=true: TENSOR_MP_SIZE={tensor} does not divide SEQ_LENGTH={size.sequence}."
        )


def _check_batch(settings: Settings) -> None:
    each = settings.micro_batch_size * settings.dp_size
    if settings.global_batch_size % each:
        near = max(settings.global_batch_size // each, 1) * each
        raise RunError(
            f"GLOBAL_BATCH_SIZE={settings.global_batch_size}: must be a multiple of MICRO_BATCH_SIZE × "
            f"DP_SIZE = {each}; {near} would fit."
        )
    # An interleaved schedule hands out micro-batches in groups of one per stage.
    stages = settings.pipeline_mp_size
    if settings.virtual_stages > 1 and settings.micro_batches % stages:
        near = max(settings.micro_batches // stages, 1) * stages * each
        raise RunError(
            f"VIRTUAL_STAGES={settings.virtual_stages}: needs a multiple of PIPELINE_MP_SIZE={stages} "
            f"micro-batches per data-parallel rank, not {settings.micro_batches}; "
            f"GLOBAL_BATCH_SIZE={near} would fit."
        )


def _divisors(number: int, most: int | None = None) -> str:
    """The divisors of ``number`` up to ``most``."""
    return ", ".join(str(part) for part in range(1, (most or number) + 1) if number % part == 0)

"""All settings of a run as one value, the sizes of a model, the models that MODEL names, and what must fit
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

from megatron_lm.errors import RunError


@dataclass(frozen=True)
class Size:
    """A decoder-only transformer.

    hidden: width; layers: transformer layers; heads: attention heads; sequence: tokens per sample;
    vocabulary: tokens; ffn: width of the MLP; kv_groups: key-value heads (``heads``: multi-head attention,
    fewer: grouped queries); swiglu: gated MLP with SiLU instead of GELU; normalization: layernorm or rmsnorm;
    position: learned or rope; rotary_base: of the rope angles; linear_bias: linear layers have biases;
    tied_embedding: the output layer shares the embedding's weights.
    """

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int
    ffn: int
    kv_groups: int
    swiglu: bool = False
    normalization: str = "layernorm"
    position: str = "learned"
    rotary_base: int = 10_000
    linear_bias: bool = True
    tied_embedding: bool = True


# The last sizes of a Llama 3: SwiGLU, RMSNorm, rope, no biases, untied embeddings.
LLAMA = (True, "rmsnorm", "rope", 500_000, False, False)
# The tiny ones run on a laptop; their vocabulary is that of the sample's tokenizer in data/.
MODELS = {
    "tiny": Size(64, 4, 4, 64, 2_920, 256, 4),
    "small": Size(1024, 24, 16, 1024, 50_257, 4_096, 16),
    "xl": Size(1600, 48, 16, 1024, 50_257, 6_400, 16),
    "llama-tiny": Size(64, 4, 4, 64, 2_920, 192, 2, *LLAMA),
    "llama3-8b": Size(4096, 32, 32, 8192, 128_256, 14_336, 8, *LLAMA),
}


@dataclass(frozen=True)
class Settings:
    """The settings of ``_00_conf.sh``, which describes each, under their names in small letters.

    Defaults are those of ``MODEL=xl``. Sizes of the model that are None or empty are those of MODEL.
    """

    # Processes, and how they share the work
    homogeneous_cluster: bool = True
    model: str = "xl"
    nproc_per_node: int = 4
    nnodes: int = 8
    world_size: int = 32
    global_batch_size: int = 64
    micro_batch_size: int = 1
    tensor_mp_size: int = 1
    dp_size: int = 4
    pipeline_mp_size: int = 8
    partition: str = "0-11-8-8-8-8-5-0"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    attention: Literal["unfused", "flash"] = "unfused"
    sharded_optimizer: bool = False
    # Model
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    seq_length: int | None = None
    vocab_size: int | None = None
    ffn: int | None = None
    kv_groups: int | None = None
    swiglu: bool | None = None
    normalization: Literal["", "layernorm", "rmsnorm"] = ""
    position: Literal["", "learned", "rope"] = ""
    rotary_base: int | None = None
    linear_bias: bool | None = None
    tied_embedding: bool | None = None
    # Training
    train_iters: int = 50
    log_interval: int = 10
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    lr: float = 1.5e-4
    lr_decay_iters: int = 320_000
    lr_warmup_fraction: float = 0.01
    seed: int = 1234
    data_path: str = ""
    split: str = "100,0,0"
    stop_on_nan: int = 50
    save: str = ""
    save_interval: int = 0
    load: str = ""
    # What is recorded
    report_to: Literal["", "tensorboard", "wandb"] = ""
    profile: bool = False
    profile_chakra: bool = False
    trace_output_dir: str = "../outputs"
    nsys: bool = False
    ncu: bool = False
    log_dir: str = "../log2"
    # Cluster
    master_port: int = 6787
    slurm_queue: str = ""
    master_queue: str = ""
    slave_queue: str = ""
    master_nnodes: int = 1
    gres: str = "gpu:4"
    master_gres: str = "gpu:4"
    slave_gres: str = "gpu:4"
    cpus_per_task: int = 8
    time_limit: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    nodelist: str = ""
    sbatch_options: str = ""
    # Container
    reload_container: bool = False
    container_image_path: str = ""
    container_path: str = ""
    container_name: str = "megatron-lm"
    container_python: str = "python3"

    @cached_property
    def size(self) -> Size:
        """The sizes of MODEL, with the ones that are set in their place."""
        base = MODELS[self.model]
        given = {part: getattr(self, name.lower()) for name, part in SIZE_SETTINGS.items()}
        size = replace(base, **{part: value for part, value in given.items() if value not in (None, "")})
        if self.ffn is None and (size.hidden, size.swiglu) != (base.hidden, base.swiglu):
            # 4·hidden, or 8/3·hidden rounded up to 64 if the MLP is gated, which has about as many weights.
            ffn = -(-8 * size.hidden // 3 // 64) * 64 if size.swiglu else 4 * size.hidden
            size = replace(size, ffn=ffn)
        if self.kv_groups is None and size.heads != base.heads:
            size = replace(size, kv_groups=size.heads)
        return size

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage; with VIRTUAL_STAGES, of each chunk in the order of the layers, where
        stage i of p has chunks i, i + p, i + 2p, ….
        """
        return tuple(int(part) for part in self.partition.split("-"))

    @property
    def layout(self) -> str:
        """``layers`` in megatron-core's notation: E embedding, t layer, L loss, | between stages."""
        stages = [f"t*{layers}" if layers else "" for layers in self.layers]
        return f"E{stages[0]}" + "".join(f"|{stage}" for stage in stages[1:]) + "L"

    @property
    def micro_batches(self) -> int:
        """Micro-batches per data-parallel rank and iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding: a multiple of 128, for any power of 2 of tensor-parallel ranks to share."""
        return -(-self.size.vocabulary // 128) * 128


NAMES = tuple(field.name.upper() for field in fields(Settings))
# The setting of each size, and the name that the size has in ``Size``.
SIZE_SETTINGS = {
    "HIDDEN_SIZE": "hidden", "NUM_LAYERS": "layers", "NUM_HEADS": "heads", "SEQ_LENGTH": "sequence",
    "VOCAB_SIZE": "vocabulary", "FFN": "ffn", "KV_GROUPS": "kv_groups", "SWIGLU": "swiglu",
    "NORMALIZATION": "normalization", "POSITION": "position", "ROTARY_BASE": "rotary_base",
    "LINEAR_BIAS": "linear_bias", "TIED_EMBEDDING": "tied_embedding",
}  # fmt: skip
# Of the whole numbers; all others are at least 1.
MAY_BE_ZERO = ("seed", "stop_on_nan", "save_interval", "master_port")


def check(settings: Settings) -> None:
    """Raise ``RunError`` if the settings do not fit together, with what would fit."""
    for is_wrong, sentence in _mistakes(settings):
        if is_wrong:
            raise RunError(f"{sentence}.")


Mistakes = Iterator[tuple[object, str]]
"""Whether something is wrong, and what; what comes later needs all before it to be right."""


def _mistakes(settings: Settings) -> Mistakes:
    yield settings.model not in MODELS, f"MODEL={settings.model}: choose from {', '.join(MODELS)}"
    for name in (field.name for field in fields(settings) if field.name not in MAY_BE_ZERO):
        value = getattr(settings, name)
        yield type(value) is int and value < 1, f"{name.upper()}={value}: give at least 1"
    port, lr, warm_up = settings.master_port, settings.lr, settings.lr_warmup_fraction
    yield not 1 <= port <= 65_535, f"MASTER_PORT={port}: give a port from 1 to 65535"
    between = f"LR={lr:g}, LR_WARMUP_FRACTION={warm_up:g}: give values between 0 and 1"
    yield not (0 < lr < 1 and 0 <= warm_up < 1), between
    world, each, nodes = settings.world_size, settings.nproc_per_node, settings.nnodes
    yield (
        world != each * nodes,
        f"WORLD_SIZE={world}: NPROC_PER_NODE × NNODES = {each} × {nodes} = {each * nodes}; leave WORLD_SIZE "
        f"out, or set it to {each * nodes}",
    )
    dp, tensor, pipeline = settings.dp_size, settings.tensor_mp_size, settings.pipeline_mp_size
    rest, over = divmod(world, tensor * pipeline)
    product = f"TENSOR_MP_SIZE × PIPELINE_MP_SIZE = {tensor * pipeline}"
    yield (
        dp * tensor * pipeline != world,
        f"WORLD_SIZE={world} is not DP_SIZE × TENSOR_MP_SIZE × PIPELINE_MP_SIZE = {dp} × {tensor} × "
        f"{pipeline} = {dp * tensor * pipeline}; "
        + (f"{product} does not divide it" if over else f"DP_SIZE={rest} would fit"),
    )
    yield from _of_partition(settings)
    yield from _of_tensor_parallelism(settings)
    yield from _of_batch(settings)
    flash = "ATTENTION=flash: GPUs have no such kernel for PRECISION=fp32; give fp16 or bf16, or unfused"
    yield settings.attention == "flash" and settings.precision == "fp32", flash
    try:
        shares = [float(part) for part in settings.split.split(",")]
    except ValueError:
        shares = []
    split = f"SPLIT={settings.split}: give shares of training, validation and test data, such as 100,0,0"
    yield len(shares) != 3 or min(shares) < 0 or not shares[0], split
    yield (
        not settings.homogeneous_cluster and settings.master_nnodes >= nodes,
        f"MASTER_NNODES={settings.master_nnodes}: must be below NNODES ({nodes}), because the slave job gets "
        "the remaining nodes; give 1, and NNODES of at least 2",
    )


def _of_partition(settings: Settings) -> Mistakes:
    stages, chunks = settings.pipeline_mp_size, settings.virtual_stages
    layers, parts = settings.size.layers, settings.partition.split("-")
    many, given = stages * chunks, f"PARTITION={settings.partition}"
    even = [layers // many + (at < layers % many) for at in range(many)]
    fit = "-".join(map(str, even)) + " would fit"
    is_number = [part.isascii() and part.isdigit() for part in parts]
    yield not all(is_number), f"{given}: give the layers of each stage; {fit}"
    yield chunks > 1 and stages == 1, f"VIRTUAL_STAGES={chunks}: needs PIPELINE_MP_SIZE of at least 2"
    wanted = f"PIPELINE_MP_SIZE is {stages}" + (f", × VIRTUAL_STAGES = {many}" if chunks > 1 else "")
    yield len(parts) != many, f"{given} has {len(parts)} stages, {wanted}; {fit}"
    total = sum(settings.layers)
    yield total != layers, f"{given} adds up to {total} layers, model {settings.model} has {layers}; {fit}"
    for stage, held in enumerate(settings.layers):
        yield (
            not held and 0 < stage < many - 1,
            f"{given}: stage {stage} has no layers; only the first stage, which has the embedding, and the "
            f"last, which has the loss, can have none; {fit}",
        )


def _of_tensor_parallelism(settings: Settings) -> Mistakes:
    size, tensor = settings.size, settings.tensor_mp_size
    rule = f"NUM_HEADS={size.heads}: does not divide HIDDEN_SIZE={size.hidden}"
    yield size.hidden % size.heads, f"{rule}; {_divisors(size.hidden, size.heads)} would"
    width = size.hidden // size.heads
    even = f"POSITION=rope: needs heads of even width, HIDDEN_SIZE / NUM_HEADS is {width}"
    yield size.position == "rope" and width % 2, even
    rule = f"KV_GROUPS={size.kv_groups}: does not divide NUM_HEADS={size.heads}"
    yield size.heads % size.kv_groups, f"{rule}; {_divisors(size.heads)} would"
    for name, number, what in (
        ("NUM_HEADS", size.heads, "attention heads"),
        ("KV_GROUPS", size.kv_groups, "key-value groups"),
        ("FFN", size.ffn, "columns of the MLP"),
        ("VOCAB_SIZE", settings.padded_vocabulary, "rows of the embedding"),
    ):
        fit = f"{_divisors(number, 64)} fit"
        yield number % tensor, f"TENSOR_MP_SIZE={tensor}: can't share {number} {what} ({name}); {fit}"
    split = settings.sequence_parallel
    yield split and tensor == 1, "SEQUENCE_PARALLEL=true: needs TENSOR_MP_SIZE of at least 2"
    over = f"SEQUENCE_PARALLEL=true: TENSOR_MP_SIZE={tensor} does not divide SEQ_LENGTH={size.sequence}"
    yield split and size.sequence % tensor, over


def _of_batch(settings: Settings) -> Mistakes:
    each, batch = settings.micro_batch_size * settings.dp_size, settings.global_batch_size
    rule = f"must be a multiple of MICRO_BATCH_SIZE × DP_SIZE = {each}"
    yield batch % each, f"GLOBAL_BATCH_SIZE={batch}: {rule}; {max(batch // each, 1) * each} would fit"
    # An interleaved schedule hands out micro-batches in groups of one per stage.
    stages = settings.pipeline_mp_size
    chunks, count = settings.virtual_stages, settings.micro_batches
    near = max(count // stages, 1) * stages * each
    yield (
        chunks > 1 and count % stages,
        f"VIRTUAL_STAGES={chunks}: needs a multiple of PIPELINE_MP_SIZE={stages} micro-batches per "
        f"data-parallel rank, not {count}; GLOBAL_BATCH_SIZE={near} would fit",
    )


def _divisors(number: int, most: int | None = None) -> str:
    """The divisors of ``number`` up to ``most``."""
    return ", ".join(str(part) for part in range(1, (most or number) + 1) if number % part == 0)

"""All settings of a run as one value, the sizes of a model, and the models that MODEL names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

NORMALIZATIONS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")


@dataclass(frozen=True)
class Size:
    """A decoder-only transformer.

    hidden: width; layers: transformer layers; heads: attention heads; sequence: tokens per sample;
    vocabulary: tokens; ffn: width of the MLP; kv_groups: key-value heads (``heads``: multi-head attention,
    fewer: grouped queries); swiglu: gated MLP with SiLU instead of GELU; normalization, position: one of
    the names above; rotary_base: of the rope angles; linear_bias: linear layers have biases;
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
    recompute: str = "none"
    attention: str = "unfused"
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
    normalization: str = ""
    position: str = ""
    rotary_base: int | None = None
    linear_bias: bool | None = None
    tied_embedding: bool | None = None
    # Training
    train_iters: int = 50
    log_interval: int = 10
    precision: str = "fp16"
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
    report_to: str = ""
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
    def parts(self) -> tuple[int, ...]:
        """The numbers in PARTITION."""
        return tuple(int(part) for part in self.partition.split("-"))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage; with VIRTUAL_STAGES, of each chunk in the order of the layers.

        Stage i of p has chunks i, i + p, i + 2p, …; a PARTITION of p parts divides each evenly into chunks.
        """
        if self.virtual_stages == 1 or len(self.parts) != self.pipeline_mp_size:
            return self.parts
        return tuple(part // self.virtual_stages for part in self.parts) * self.virtual_stages

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

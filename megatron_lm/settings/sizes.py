"""The sizes of a model, and the models that MODEL names."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def layer_operations(self) -> int:
        """Floating-point operations of one layer's forward pass per token: two per multiplication."""
        hidden = self.hidden
        attention = (
            hidden * (2 * hidden + 2 * hidden * self.kv_groups // self.heads) + 2 * self.sequence * hidden
        )
        mlp = (3 if self.swiglu else 2) * hidden * self.ffn
        return 2 * (attention + mlp)

    @property
    def head_operations(self) -> int:
        """Floating-point operations of the output layer's forward pass per token."""
        return 2 * self.hidden * self.vocabulary


def gpt2(hidden: int, layers: int, heads: int, sequence: int, vocabulary: int) -> Size:
    """A GPT-2."""
    return Size(hidden, layers, heads, sequence, vocabulary, 4 * hidden, heads)


def llama(
    hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, ffn: int, kv_groups: int
) -> Size:
    """A Llama 3: grouped queries, SwiGLU, RMSNorm, rope, no biases, untied embeddings."""
    return Size(
        *(hidden, layers, heads, sequence, vocabulary, ffn, kv_groups),
        swiglu=True,
        normalization="rmsnorm",
        position="rope",
        rotary_base=500_000,
        linear_bias=False,
        tied_embedding=False,
    )


# The tiny ones run on a laptop; their vocabulary is that of the sample's tokenizer in data/.
MODELS = {
    "tiny": gpt2(64, 4, 4, 64, 2_920),
    "small": gpt2(1024, 24, 16, 1024, 50_257),
    "xl": gpt2(1600, 48, 16, 1024, 50_257),
    "llama-tiny": llama(64, 4, 4, 64, 2_920, 192, 2),
    "llama3-8b": llama(4096, 32, 32, 8192, 128_256, 14_336, 8),
}


def default_ffn(hidden: int, swiglu: bool) -> int:
    """MLP width of a model that names none: 4·hidden, or 8/3·hidden rounded up to 64 if the MLP is gated,
    which has about as many weights."""
    return -(-8 * hidden // 3 // 64) * 64 if swiglu else 4 * hidden

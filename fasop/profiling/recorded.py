"""Whether a trace is of the model that it is taken for: sizes read from the shapes of its operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fasop.errors import PlanError
from fasop.inputs.models import Model
from fasop.profiling.shapes import Shapes, Size

PADDED = 128  # Megatron pads a vocabulary to a multiple of 128 × tp rows; others pad less
NAMED = 8  # products that a refusal lists


def check(model: Model, shapes: Shapes, own: str, tp: int, mbs: int) -> list[str]:
    """What could not be checked, or was taken to be so, as sentences.

    own: how a refusal begins. Raises ``PlanError`` where a size of the trace is not the model's, or a part
    of the model is missing.
    """
    table = shapes.table
    for what, found, expected in (("hidden", table.hidden, model.hidden), ("seq", table.seq, model.seq)):
        if found != expected:
            raise PlanError(
                f"{own}: {what} is {found} in it, {expected} in the model: give the model it is of."
            )
    padding = table.rows * tp - model.vocab
    if not 0 <= padding < PADDED * tp:
        raise PlanError(
            f"{own}: its embedding has {table.rows} rows on each of {tp} tensor-parallel ranks, the model's "
            f"vocabulary {model.vocab}: give the model it is of, and its --tp."
        )
    if table.batch != mbs:
        raise PlanError(f"{own}: its micro-batches have {table.batch} sequences: give --mbs {table.batch}.")
    for what, count in (("heads", model.heads), ("ffn", model.ffn_width)):
        if count % tp:
            raise PlanError(f"{own}: the model's {what} {count} can't be split over --tp {tp}.")
    notes = [f"{padding} rows of its embedding are taken as padding of the vocabulary."] if padding else []
    unseen = ["tied", "causal", *_check_attention(model, shapes, own, tp)]
    if model.experts:
        unseen += _check_routing(model, shapes, own)
    others: dict[str, None] = {}
    for number, products in enumerate(shapes.products):
        where = f"{own}, micro-batch {number + 1} of {len(shapes.products)}"
        if not products[model.hidden, table.rows]:
            raise PlanError(
                f"{where}: no head in it (no product with its {table.rows} words): this rank holds a part of "
                "a pipeline; give traces of a run with one pipeline stage."
            )
        layers = Counter(products)
        del layers[model.hidden, table.rows]
        more = _check_layers(model, layers, shapes.batched[number], where, tp)
        if more:
            others[_listed(more)] = None
    notes += [f"Products that are of no layer are counted to the layers: {text}." for text in others]
    return [*notes, f"Not checked, as its shapes don't show them: {', '.join(unseen)}."]


def _check_attention(model: Model, shapes: Shapes, own: str, tp: int) -> list[str]:
    heads, kv_heads = model.heads // tp, _kv_heads(model, tp)
    found = shapes.fused or shapes.unfused
    if not found:
        return ["heads and kv_heads (their widths are)"]
    # Keys may have been repeated for each query's head; then the products tell how many there were.
    expected = {(heads, count, model.head_width) for count in (heads, kv_heads)}
    if not found & expected:
        texts = [f"{q} heads of {width} with {kv} of keys and values" for q, kv, width in sorted(found)]
        raise PlanError(
            f"{own}: its attention has {' and '.join(texts)} on each of {tp} tensor-parallel ranks, the "
            f"model {heads} of {model.head_width} with {kv_heads}: give the model it is of, and its --tp."
        )
    return []


def _check_routing(model: Model, shapes: Shapes, own: str) -> list[str]:
    taken = {count for experts, count in shapes.routed if experts == model.experts}
    if taken and taken != {model.top_k}:
        raise PlanError(
            f"{own}: a token takes {sorted(taken)[0]} of {model.experts} experts in it, {model.top_k} in the "
            "model: give the model it is of."
        )
    return ["how many experts this rank holds"] + ([] if taken else ["top_k"])


def _check_layers(
    model: Model, products: Counter[Size], batched: Counter[Size], where: str, tp: int
) -> Counter[Size]:
    """Products that are of no layer: few, such as those before a BERT's head."""
    every, products = products, Counter(products)
    attention, feed_forward = _attention(model, tp), _feed_forward(model, tp)
    if model.experts:
        _take_experts(model, products, batched, where, tp)
    whole = [a + f for a in attention for f in feed_forward]
    count, needed = max(
        ((_times(products, one), one) for one in whole), key=lambda found: (found[0], found[1].total())
    )
    if count != model.layers:
        raise PlanError(f"{where}: " + _difference(model, every, attention, feed_forward, tp))
    left = products - Counter({size: count * each for size, each in needed.items()})
    # A pooler, and the transform before a BERT's head, are hidden × hidden.
    small = {(model.hidden, model.hidden): 2}
    extra = {size: times for size, times in left.items() if times > small.get(size, max(model.layers, 2) - 1)}
    if extra:
        raise PlanError(
            f"{where}: its {model.layers} layers also multiply by {_listed(extra)}, which the model doesn't "
            "have: give the model it is of (gated, experts, kv_heads)."
        )
    return left


def _difference(
    model: Model,
    products: Counter[Size],
    attention: Sequence[Counter[Size]],
    feed_forward: Sequence[Counter[Size]],
    tp: int,
) -> str:
    """The layers differ: in number, or in what one multiplies by."""
    counts = [max(_times(products, one) for one in part) for part in (attention, feed_forward)]
    if counts[0] == counts[1] != 0:
        return (
            f"{counts[0]} layers with a feed-forward part of {model.ffn_width // tp} in it, {model.layers} "
            "in the model: give the model it is of; a rank with fewer layers holds a part of a pipeline."
        )
    parts = ("query, key, value and output", "router" if model.experts else "feed-forward")
    wrong = [
        f"{name} products of " + ", or ".join(" + ".join(map(_text, one.elements())) for one in part)
        for name, part, count in zip(parts, (attention, feed_forward), counts, strict=True)
        if count != model.layers
    ] or ["products for both of its parts"]
    return (
        f"{model.layers} times {' and '.join(wrong)} in the model on each of {tp} tensor-parallel ranks, "
        f"{_listed(products)} in it: give the model it is of, and its --tp; compiled or fused layers "
        "can't be told apart."
    )


def _attention(model: Model, tp: int) -> list[Counter[Size]]:
    """Queries, keys and values in one product, each in its own, or keys with values."""
    h, width = model.hidden, model.width // tp
    kv = _kv_heads(model, tp) * model.head_width
    inputs = [[(h, width + 2 * kv)], [(h, width), (h, kv), (h, kv)], [(h, width), (h, 2 * kv)]]
    return [Counter([*sizes, (width, h)]) for sizes in inputs]


def _feed_forward(model: Model, tp: int) -> list[Counter[Size]]:
    h, width = model.hidden, model.ffn_width // tp
    if model.experts:
        return [Counter([(h, model.experts)])]
    if model.gated:
        return [Counter([(h, 2 * width), (width, h)]), Counter([(h, width), (h, width), (width, h)])]
    return [Counter([(h, width), (width, h)])]


def _take_experts(model: Model, products: Counter[Size], batched: Counter[Size], where: str, tp: int) -> None:
    """Remove the experts' products from ``products``; how many run depends on the tokens."""
    h = model.hidden
    widths = {model.ffn_width // tp, model.ffn_width}  # experts may be split or whole
    ups = {(h, scale * width) for width in widths for scale in ((1, 2) if model.gated else (1,))}
    downs = {(width, h) for width in widths}
    for name, sizes in (("into", ups), ("out of", downs)):
        count = sum(products[size] + batched[size] for size in sizes)
        if count < model.layers:
            raise PlanError(
                f"{where}: {count} products {name} experts of width {model.ffn_width} in it, at least "
                f"{model.layers} in the model; it has {_listed(products + batched)}: give the model it is of."
            )
    kept = _attention(model, tp)[1]
    for size in ups | downs:
        # Experts as wide as the attention can't be told from it.
        if size not in kept:
            del products[size]


def _kv_heads(model: Model, tp: int) -> int:
    # Fewer than the ranks: each rank has one.
    return max((model.kv_heads or model.heads) // tp, 1)


def _times(products: Counter[Size], needed: Counter[Size]) -> int:
    return min(products[size] // each for size, each in needed.items())


def _listed(products: Counter[Size] | dict[Size, int]) -> str:
    """Sizes with their counts, the most frequent first."""
    ordered = sorted(products.items(), key=lambda item: -item[1])
    texts = [f"{times} of {_text(size)}" for size, times in ordered[:NAMED]]
    more = len(ordered) - NAMED
    return (", ".join(texts) or "none") + (f" and {more} other sizes" if more > 0 else "")


def _text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"

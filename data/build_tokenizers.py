"""Train the two small tokenizers of data/tokenizers on data/squad_sample.json.

    python data/build_tokenizers.py [--output data/tokenizers]

They replace the real GPT-2 and BERT vocabularies if neither the hub nor a copy is available. Their ids stay
far below 50257 and 30522, so a model has the same shapes and costs with either tokenizer. Takes about a
second; the same sample gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 4096  # beyond this, merges only memorise words that occur twice in the sample


def sample_texts() -> list[str]:
    """Every context and question of the sample once."""
    articles = json.loads((HERE / "squad_sample.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    return [text for p in paragraphs for text in (p["context"], *(qa["question"] for qa in p["qas"]))]


def train_gpt2(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: the alphabet has all 256 bytes, so no text is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_bert(texts: list[str]) -> Tokenizer:
    """Lower-cased WordPiece; [PAD] has id 0, because row 0 of BERT's embedding is padding."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer = normalizers.BertNormalizer(lowercase=True)
    # The trainer meets the pieces "##x" in the order of a hash table; listing them first fixes their ids, and
    # with them the order of merges that tie.
    pieces = sorted({"##" + letter for text in texts for letter in normalizer.normalize_str(text)} - {"## "})
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, min_frequency=2, special_tokens=specials + pieces, show_progress=False
    )
    draft = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    draft.normalizer = normalizer
    draft.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    draft.train_from_iterator(texts, trainer)

    tokenizer = Tokenizer(models.WordPiece(draft.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = draft.normalizer
    tokenizer.pre_tokenizer = draft.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, settings: dict[str, object]) -> None:
    """Write the two files that ``AutoTokenizer`` of transformers 4.44 to 5.x reads."""
    state = json.loads(tokenizer.to_str())
    merges = state["model"].get("merges")
    if merges and not isinstance(merges[0], str):
        # tokenizers 0.19, which transformers 4.44 pins, reads merges only as "left right".
        state["model"]["merges"] = [" ".join(pair) for pair in merges]
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    for name, value in (("tokenizer.json", state), ("tokenizer_config.json", settings)):
        text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "tokenizers", help="folder for both")
    output = parser.parse_args().output
    texts = sample_texts()

    end = "<|endoftext|>"
    gpt2 = {"model_max_length": 1024, "bos_token": end, "eos_token": end, "unk_token": end}
    write(train_gpt2(texts), output / "gpt2", gpt2)

    bert: dict[str, object] = {"model_max_length": 512}
    bert |= {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    write(train_bert(texts), output / "bert-base-uncased", bert)
    print(f"wrote {output / 'gpt2'} and {output / 'bert-base-uncased'}")


if __name__ == "__main__":
    main()

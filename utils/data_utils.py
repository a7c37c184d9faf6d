"""The data, from flags to samples: read (squad.py) → tokenize (tokenizers.py) → lay out (this file).

Every sample is padded to --max-seq-length on the right; ``stack`` cuts a batch to its longest sample. Labels
are -100, which PyTorch's cross entropy ignores, wherever nothing is to be predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedTokenizerFast

from utils.data.config import DataConfig
from utils.data.squad import Example, load_squad
from utils.data.tokenizers import MAX_LENGTH, Family, TokenizedPairs, tokenize_pairs

IGNORED = -100
MULTIPLE = 8  # Tensor Cores are fastest on sizes that are multiples of 8
MASKED_SHARE = 0.15
Sample = dict[str, torch.Tensor]
Ids = npt.NDArray[np.int64]


class SquadDataset(Dataset[Sample]):
    """Map-style data set; each sample has int64 [max_seq_length] tensors: input_ids, attention_mask, labels
    and, for BERT, token_type_ids.

    ``source`` says in words where the text came from; ``fingerprint`` is equal on ranks with the same data.
    """

    def __init__(self, pairs: TokenizedPairs, length: int, source: str, seed: int) -> None:
        self.pairs, self.length, self.source, self.seed = pairs, length, source, seed
        self.fingerprint = pairs.fingerprint
        # In shared memory: persistent workers keep the copy of this object that they started with.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.pairs)

    def set_epoch(self, epoch: int) -> None:
        """Draw new masks (BERT only).

        DataLoader workers see the change too, persistent or not. Call it between epochs, before the loader's
        next iterator is created, because workers prefetch.
        """
        self.epoch.fill_(epoch)

    def padded(self, **rows: tuple[Ids, int]) -> Sample:
        """Each row as a tensor of the full length; the value after it fills the rest."""
        found = {name: torch.full((self.length,), fill) for name, (_, fill) in rows.items()}
        for name, (row, _) in rows.items():
            found[name][: len(row)] = torch.from_numpy(row)
        return found


class CausalDataset(SquadDataset):
    """For GPT-2: question, newline, context and <|endoftext|>, cut or padded to the sample length.

    Labels equal the inputs; the loss shifts them by one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *of_base: Any) -> None:
        super().__init__(*of_base)
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
        self.newline, self.end = np.array(newline, dtype=np.int64), int(tokenizer.eos_token_id)

    def __getitem__(self, index: int) -> Sample:
        question, context = self.pairs[index]
        ids = np.concatenate([question, self.newline, context, [self.end]])[: self.length]
        # By position, not by id: padding is <|endoftext|> too, and the real one keeps its label.
        mask = np.ones_like(ids)
        return self.padded(input_ids=(ids, self.end), attention_mask=(mask, 0), labels=(ids, IGNORED))


class MaskedDataset(SquadDataset):
    """For BERT: [CLS] question [SEP] context [SEP] with masked tokens to predict (Devlin et al. 2019, 3.1).

    15% of the ordinary tokens, at least one, have labels; of these 80% become [MASK], 10% a random token and
    10% stay. The choice depends on seed, epoch and index alone, so it survives a resume and doesn't depend on
    the number of ranks or workers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *of_base: Any) -> None:
        super().__init__(*of_base)
        self.cls, self.sep, self.pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
        self.mask, self.unknown = tokenizer.mask_token_id, tokenizer.unk_token_id
        vocabulary = np.array(sorted(tokenizer.get_vocab().values()))
        self.maskable = np.zeros(vocabulary[-1] + 1, dtype=bool)  # [vocabulary], indexed by id
        self.maskable[vocabulary] = True
        self.maskable[tokenizer.all_special_ids] = False
        self.ordinary = np.flatnonzero(self.maskable)

    def __getitem__(self, index: int) -> Sample:
        question, context = self.pairs[index]
        room = self.length - 3
        # The context is cut first; the question too if it alone would take more than half.
        question = question[: max(room // 2, room - len(context))]
        context = context[: room - len(question)]
        ids = np.concatenate([[self.cls], question, [self.sep], context, [self.sep]])
        second = np.zeros_like(ids)
        second[len(question) + 2 :] = 1
        masked, labels = self.masked(ids, index)
        return self.padded(
            input_ids=(masked, self.pad),
            attention_mask=(np.ones_like(ids), 0),
            token_type_ids=(second, 0),
            labels=(labels, IGNORED),
        )

    def masked(self, ids: Ids, index: int) -> tuple[Ids, Ids]:
        """``ids`` with masks, and the labels; both [len(ids)]."""
        candidates = np.flatnonzero(self.maskable[ids])
        if not len(candidates):
            # A text in a script that the vocabulary lacks: without any label its loss would be NaN.
            candidates = np.flatnonzero(ids == self.unknown)
        count = min(len(candidates), max(1, round(MASKED_SHARE * len(candidates))))
        draw = np.random.default_rng([self.seed % 2**64, int(self.epoch), index])
        chosen = draw.permutation(candidates)[:count]
        labels = np.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        fate = draw.random(count)
        random = self.ordinary[draw.integers(len(self.ordinary), size=count)]
        masked = ids.copy()
        masked[chosen] = np.where(fate < 0.8, self.mask, np.where(fate < 0.9, random, ids[chosen]))
        return masked, labels


def build_datasets(
    family: Family, tokenizer: PreTrainedTokenizerFast, config: DataConfig, seed: int
) -> tuple[SquadDataset, SquadDataset]:
    """Return the training and validation sets; validation masks are the same for every seed and epoch.

    Without ``config.max_seq_length``, samples are as long as the model allows. Raises ``DataError``.
    """
    length = config.max_seq_length or MAX_LENGTH[family]
    squad = load_squad(config.dataset, config.require_dataset)
    kind = MaskedDataset if family == "bert" else CausalDataset

    def build(examples: list[Example], seed: int) -> SquadDataset:
        return kind(tokenizer, tokenize_pairs(examples, tokenizer), length, squad.source, seed)

    return build(squad.train, seed), build(squad.validation, 0)


def stack(samples: list[Sample]) -> Sample:
    """A batch without the padding that all its samples share: int64 [batch, longest sample, rounded up]."""
    batch: Sample = default_collate(samples)
    longest = int(batch["attention_mask"].sum(dim=1).max())
    length = -(-longest // MULTIPLE) * MULTIPLE
    return {name: tensor[:, :length].contiguous() for name, tensor in batch.items()}

"""Shared by the data modules: their flags and error, logging on rank 0, and whether the Hugging Face hub
answers."""

from __future__ import annotations

import functools
import logging
import os
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chakra_et.cli import option

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
PROBE_SECONDS = 5.0

_logger = logging.getLogger(__name__)


class DataError(ValueError):
    """Bad input from the user; the message names the flag or file and what to do."""


@dataclass
class DataConfig:
    """What to train on, and how it is cut into samples."""

    dataset: str = option("squad (hub cache or hub), sample (in data/) or a SQuAD JSON file", "squad")
    tokenizer: str | None = option("tokenizer.json or its folder (default: the first one found)", None)
    max_seq_length: int | None = option(
        "longest sample, tokens (default: the model's; on CPUs 128)", None, least=8
    )
    padding: Literal["longest", "max"] = option(
        "longest: pad to the longest sample of a batch; max: to --max-seq-length, so that all steps have the "
        "same shapes",
        "longest",
    )
    require_dataset: bool = option("fail if SQuAD can't be had, instead of using the sample", False)
    num_workers: int = option("data-loading processes per rank (0: load in the training process)", 2, least=0)


def log_once(level: int, message: str) -> None:
    """Log one line, on rank 0 only (torchrun's RANK; a process without it is rank 0)."""
    if os.environ.get("RANK", "0") == "0":
        _logger.log(level, message)


def hub_problem() -> str | None:
    """Why the hub can't be used, or None if it answers.

    An offline variable is believed without a probe. Otherwise one HEAD request to HF_ENDPOINT (through the
    usual proxy variables) decides within ``PROBE_SECONDS``, once per process. The hub libraries offer no such
    limit: behind a firewall that drops packets their retries take minutes.
    """
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return f"{name} is set"
    return _probe(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", PROBE_SECONDS)


def datasets_cache() -> Path:
    """The folder that ``datasets`` caches in: HF_DATASETS_CACHE, or below HF_HOME."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")).expanduser()


@functools.lru_cache
def _probe(endpoint: str, seconds: float) -> str | None:
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=seconds).close()
            outcome.append(None)
        except urllib.error.HTTPError as error:
            # Any answer from the hub itself is enough; a 5xx comes from a proxy or a hub that is down.
            outcome.append(f"{endpoint} answered {error.code}" if error.code >= 500 else None)
        except Exception as error:  # OSError for the network, HTTPException for non-HTTP, ValueError
            outcome.append(f"{endpoint} can't be reached: {getattr(error, 'reason', error)}")

    # In a thread, because the timeout of urlopen doesn't cover the name lookup.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"{endpoint} didn't answer within {seconds:g} s"

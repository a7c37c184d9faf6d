"""Secrets are taken out of what is written or shown, by the name of an argument or variable, and by form.

Forms: user and password in a URL, tokens by the prefixes that GitHub, GitLab, Hugging Face, OpenAI, Slack,
Google and AWS document, JSON Web Tokens, private keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GONE = "[redacted]"
_KEYS = [f"{kind}{dash}key" for kind in ("api", "access", "private", "secret") for dash in ("", "_", "-")]
_WORDS = ("password", "passwd", "secret", "credential", "authorization", *_KEYS)
_NAME = r"(?:(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token|credentials|"
_NAME += "|".join(_WORDS) + ")"
_NAMED = re.compile(rf"(?i){_NAME}$")
# --hf-token X, --password=Y, WANDB_API_KEY=Z, "HF_TOKEN": "X", also as text within JSON
_ASSIGNED = re.compile(
    rf"(?i)((?:--[\w-]{{0,80}}{_NAME} |{_NAME}(?:=(?!=)|\\*\"\s*:\s*\\*\"))\s*)" + r"[^\s\"',;&\\]+"
)
_TOKENS = (
    r"hf_[A-Za-z0-9]{20,}", r"gh[pousr]_[A-Za-z0-9]{30,}", r"github_pat_\w{30,}", r"glpat-[\w-]{20,}",
    r"sk-[\w-]{20,}", r"xox[abprs]-[\w-]{10,}", r"AIza[\w-]{35}", r"A[KS]IA[0-9A-Z]{16}",
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+",
)  # fmt: skip
_KEY = r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-\"]*"
_FORMS = re.compile(rf"(?<=://)[^/\s:@\"]*:[^/\s@\"]+(?=@)|\b(?:{'|'.join(_TOKENS)})|{_KEY}")
# A text without a match of these has no secret. Each begins with plain letters, which a search finds quickly.
_NAMED_HERE = [re.compile(rf'{word}s?(?:[= ]|\\*"\s*:\s*\\*")'.encode()) for word in ("token", *_WORDS)]
_FORMED_HERE = [re.compile(form.encode()) for form in (r"://[^/\s\"]*@", *_TOKENS, _KEY)]


def redacted_json(text: bytes) -> bytes:
    """JSON text (UTF-8) without secrets, or the same object where it has none."""
    words = text.lower()
    if not any(each.search(words) for each in _NAMED_HERE) and not any(
        each.search(text) for each in _FORMED_HERE
    ):
        return text
    new = redacted(text.decode("utf-8", "replace")).encode()
    return text if new == text else new


def redacted(value: Any, name: str = "") -> Any:
    """``value`` without secrets: a text, or JSON values. ``name``: that of the field that holds it."""
    if isinstance(value, str):
        if _NAMED.search(name) and value:
            return GONE
        return _FORMS.sub(GONE, _ASSIGNED.sub(rf"\1{GONE}", value))
    if isinstance(value, Mapping):
        return {key: redacted(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        flags = ["", *(each if isinstance(each, str) and each.startswith("-") else "" for each in value)]
        return [redacted(each, flag) for flag, each in zip(flags, value, strict=False)]
    return value

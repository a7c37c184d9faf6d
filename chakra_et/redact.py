"""Secrets are taken out of what is written or shown, by the name of an argument or variable, and by form.

Forms: user and password in a URL, tokens by the prefixes that GitHub, GitLab, Hugging Face, OpenAI, Slack,
Google and AWS document, JSON Web Tokens, private keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GONE = "[redacted]"
_NAME = r"(?:(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token|passw(?:or)?d|secret"
_NAME += r"|credentials?|(?:api|access|private|secret)[-_]?key|authorization)"
_NAMED = re.compile(rf"(?i){_NAME}$")
# --hf-token X, --password=Y, WANDB_API_KEY=Z, "HF_TOKEN": "X", also as text within JSON
_ASSIGNED = re.compile(
    rf"(?i)((?:--[\w-]{{0,80}}{_NAME} |{_NAME}(?:=(?!=)|\\*\"\s*:\s*\\*\"))\s*)" + r"[^\s\"',;&\\]+"
)
_FORMS = re.compile(
    r"(?<=://)[^/\s:@\"]*:[^/\s@\"]+(?=@)|\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|glpat-[\w-]{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{35}|A[KS]IA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-\"]*"
)
# A text without a match of these has no secret. Each begins with plain letters, which a search finds quickly.
_KEYS = [a + b + b"key" for a in (b"api", b"access", b"private", b"secret") for b in (b"", b"_", b"-")]
_NAMED_HERE = [
    re.compile(word + rb's?(?:[= ]|\\*"\s*:\s*\\*")')
    for word in (b"token", b"password", b"passwd", b"secret", b"credential", b"authorization", *_KEYS)
]
_FORMED_HERE = [
    re.compile(start)
    for start in (
        rb"://[^/\s\"]*@", rb"hf_\w{20}", rb"gh[pousr]_\w{30}", rb"github_pat_", rb"glpat-", rb"sk-[\w-]{20}",
        rb"xox[abprs]-", rb"AIza[\w-]{35}", rb"A[KS]IA[0-9A-Z]{16}", rb"eyJ[\w-]{8}", rb"-----BEGIN",
    )
]  # fmt: skip


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

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
# --hf-token X, --password=Y, WANDB_API_KEY=Z, "HF_TOKEN": "X"
_ASSIGNED = re.compile(
    rf"(?i)((?:--[\w-]*{_NAME}[ =]|[\w-]*{_NAME}=|\"[\w-]*{_NAME}\"\s*:\s*\")\s*)[^\s\"',;&]+"
)
_FORMS = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|glpat-[\w-]{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{35}|A[KS]IA[0-9A-Z]{16}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*"
)


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

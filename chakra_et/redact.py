"""Secrets are taken out of what is written or shown, by the name of an argument or variable, and by form.

Forms: user and password in a URL, bearer tokens, tokens by the prefixes that GitHub, GitLab, Hugging Face,
OpenAI, Slack, Google and AWS document, JSON Web Tokens, private keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

GONE = "[redacted]"
_KEYS = ("api", "access", "private", "secret", "account", "wandb", "kaggle", "openai", "hf")
_WORDS = (
    *("password", "passwd", "passphrase", "secret", "credential", "authorization", "auth", "cookie"),
    *("_pwd", "_jwt", "_pat", "amz-signature"),
    *(f"{kind}{dash}key" for kind in _KEYS for dash in ("", "_", "-")),
)
_TOKEN = r"(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token"
_NAME = rf"(?:{_TOKEN}|(?:{'|'.join(_WORDS)})s?|(?<=[?&])(?:key|sig|code))"
_NAMED = re.compile(rf"(?i){_NAME}$")
# --hf-token X, --password=Y, WANDB_API_KEY=Z, "HF_TOKEN": "X", 'HF_TOKEN': 'X', Authorization: Bearer X
_ASSIGNED = re.compile(
    rf"(?i)(--[\w-]{{0,80}}{_NAME}\s+|{_NAME}\\*[\"']?\s*(?::(?![:/])|=(?!=))\s*(?:(?:bearer|basic)\s+)?)"
    r"(?:(\\*[\"'])(?:\\.|.)+?\2|\\*[\"']?[^\s\"',;&\\]+)"
)
_TOKENS = (
    r"hf_[A-Za-z0-9]{20,}", r"gh[pousr]_[A-Za-z0-9]{30,}", r"github_pat_\w{30,}", r"glpat-[\w-]{20,}",
    r"sk-[\w-]{20,}", r"xox[abprs]-[\w-]{10,}", r"AIza[\w-]{35}", r"A[KS]IA[0-9A-Z]{16}",
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+", r"[Bb]earer [\w.~+/-]{12,}=*",
)  # fmt: skip
_KEY = r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-\"]*"
_USER = r"(?<=://)[^/\s:@\"']*:[^/\s\"']+(?=@)|(?<=https://)[^/\s:@\"']{8,}(?=@)"
_FORMS = re.compile(rf"{_USER}|\b(?:{'|'.join(_TOKENS)})|{_KEY}")
# A text without a match of these has no secret; the word of each is looked for first, which is quicker.
_NAMED_HERE = {
    word.encode(): re.compile(rf'{word}s?[\\"\']*\s*[:=,\s]'.encode()) for word in ("token", *_WORDS)
}
_FORMED_HERE = [
    re.compile(form.removeprefix("[Bb]").encode())
    for form in (r"://[^/\s\"]*@", r"&(?:key|sig|code)=", r"\?(?:key|sig|code)=", *_TOKENS, _KEY)
]
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"(\s*:)?')


def redacted_json(text: bytes) -> bytes:
    """JSON text (UTF-8), or a piece of one, without secrets; the same object where it has none."""
    words = text.lower()
    named = (pattern for word, pattern in _NAMED_HERE.items() if word in words)
    if not any(each.search(words) for each in named) and not any(each.search(text) for each in _FORMED_HERE):
        return text
    key = name = ""

    def without(found: re.Match[bytes]) -> bytes:
        nonlocal key, name
        try:
            value = json.loads(found[0].removesuffix(found[1] or b""), strict=False)
        except ValueError:
            return found[0]
        if found[1]:
            key = name = value
            return found[0]
        kept = redacted(value, name)
        name = value if value.startswith("-") else key
        return found[0] if kept == value else json.dumps(kept).encode()

    new = _STRING.sub(without, text)
    return text if new == text else new


def _without_value(found: re.Match[str]) -> str:
    quote = found[2] or ""
    return f"{found[1]}{quote}{GONE}{quote}"


def redacted(value: Any, name: str = "") -> Any:
    """``value`` without secrets: a text, or JSON values. ``name``: that of the field that holds it."""
    if isinstance(value, str):
        if _NAMED.search(name) and value:
            return GONE
        return _FORMS.sub(GONE, _ASSIGNED.sub(_without_value, value))
    if isinstance(value, Mapping):
        return {key: redacted(each, name if _NAMED.search(name) else str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        flags = [name, *(each if isinstance(each, str) and each.startswith("-") else name for each in value)]
        return [redacted(each, flag) for flag, each in zip(flags, value, strict=False)]
    return value

"""Secrets are taken out of what is written or shown, by the name of an argument or variable, and by form.

Forms: user and password in a URL, bearer tokens, tokens by the prefixes that GitHub, GitLab, Hugging Face,
OpenAI, Slack, Google and AWS document, JSON Web Tokens, private keys.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

GONE = "[redacted]"
_KEYS = ("api", "access", "private", "secret", "account", "wandb", "kaggle", "openai", "hf")
_WORDS = (
    *("password", "passwd", "passphrase", "secret", "credential", "authorization", "auth", "cookie"),
    *("_pwd", "_jwt", "_pat", "amz-signature"),
    *(f"{kind}{dash}key" for kind in _KEYS for dash in ("", "_", "-")),
)
_TOKEN = r"(?<!special)(?<!added)(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token"
_NAME = rf"(?:{_TOKEN}|(?:{'|'.join(_WORDS)})s?|(?<=[?&])(?:key|sig|code))"
_NAMED = re.compile(rf"(?i){_NAME}$")
_QUOTED = r"(?P<quote>\\*[\"'])(?:\\.|.)+?(?P=quote)"
_BARE = r"\\*[\"']?[^\s\"',;&\\]+"
# --hf-token X, --password=Y, WANDB_API_KEY=Z, "HF_TOKEN": "X", 'HF_TOKEN': 'X', Authorization: Bearer X
_ASSIGNED = re.compile(
    rf"(?i)(--[\w-]{{0,80}}{_NAME}\s+|{_NAME}\\*[\"']?\s*(?::(?![:/])|=(?!=))\s*(?:(?:bearer|basic)\s+)?)"
    rf"(?:{_QUOTED}|{_BARE})"
)
# {"name": "HF_TOKEN", "value": "X"}, the same in the other order, and in YAML; "HF_TOKEN", "X"
_LABEL = rf"\b(?:name|key|variable)\\*[\"']?\s*[:=]\s*\\*[\"']?[\w.-]{{0,80}}?{_NAME}\b\\*[\"']?"
_VARIABLE = r"(?-i:[A-Z][A-Z0-9_]*)"
_OTHER = rf"\\*[\"']{_VARIABLE}\\*[\"']|\\*[\"'][^\"']*[\"']\s*:"  # another name, or a key
_PAIRED = re.compile(
    rf"(?i)(?:({_LABEL}[^{{}}]{{0,80}}?\bvalue\\*[\"']?\s*[:=]\s*\[?"
    rf"|\bvalue\\*[\"']\s*:\s*(?=[^{{}}]{{1,200}}?{_LABEL})"
    rf"|[\"'](?={_VARIABLE}\\*[\"'])\w{{0,80}}?{_NAME}\\*[\"']\s*,\s*(?!{_OTHER})){_QUOTED}"
    rf"|({_LABEL}\s+value:\s*){_BARE})"
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
    word.encode(): re.compile(rf'{word}s?[\\"\']*n?\s*[:=,\s}}]'.encode()) for word in ("token", *_WORDS)
}
_FORMED_HERE = [
    re.compile(form.removeprefix("[Bb]").encode())
    for form in (r"://[^/\s\"]*@", r"&(?:key|sig|code)=", r"\?(?:key|sig|code)=", *_TOKENS, _KEY)
]
_FLAG = re.compile(rf"-|{_VARIABLE}$")
_NAMES = re.compile(f"{_VARIABLE} {_VARIABLE}")  # in a list of names none is the value of the one before
_PAIRED_BYTES = re.compile(_PAIRED.pattern.encode())
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"(\s*:)?')


def redacted_json(text: bytes) -> bytes:
    """JSON text (UTF-8), or a piece of one, without secrets; the same object where it has none."""
    words = text.lower()
    named = (pattern for word, pattern in _NAMED_HERE.items() if word in words)
    if not any(each.search(words) for each in named) and not any(each.search(text) for each in _FORMED_HERE):
        return text
    key, name, until = "", "", -1  # until: the end of an object that a secret's name has

    def without(found: re.Match[bytes]) -> bytes:
        nonlocal key, name, until
        try:
            value = json.loads(found[0].removesuffix(found[1] or b""), strict=False)
        except ValueError:
            return found[0]
        if found[1]:
            key = name = value
            if _NAMED.search(key) and text[found.end() : found.end() + 2].lstrip().startswith(b"{"):
                until = text.find(b"}", found.end())
            return found[0]
        if found.start() < until:
            return b'"%b"' % GONE.encode()
        kept = (
            value if name is not key and _NAMES.fullmatch(f"{name} {value}") else _redacted_text(value, name)
        )
        name = value if _FLAG.match(value) else key
        return found[0] if kept == value else json.dumps(kept).encode()

    new = _PAIRED_BYTES.sub(rb"\1\3\g<quote>%b\g<quote>" % GONE.encode(), _STRING.sub(without, text))
    return text if new == text else new


def redacted(value: Any) -> Any:
    """``value`` without secrets: a text, or JSON values."""
    if isinstance(value, str):
        return _redacted_text(value)
    return json.loads(redacted_json(json.dumps(value, default=str).encode()))


@functools.lru_cache(4096)  # traces repeat their texts
def _redacted_text(text: str, name: str = "") -> str:
    """``name``: that of the field that holds the text."""
    if _NAMED.search(name) and text:
        return GONE
    text = _ASSIGNED.sub(rf"\1\g<quote>{GONE}\g<quote>", text)
    return _FORMS.sub(GONE, _PAIRED.sub(rf"\1\3\g<quote>{GONE}\g<quote>", text))

"""What people call a kernel, from the name that a compiler gave it: which function, and what it computes.

    kernel_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, …")

is "elementwise add"; mangled names (Itanium C++ ABI) are read too. Other names stay as they are.
"""

from __future__ import annotations

import re

from chakra_et.text import shortened

LONGEST, LONG_WORD = 80, 9
"""Letters of a name that is shown; of a word that is no type of numbers, nor a namespace."""
_MANGLED = re.compile(r"_ZN?[KVr]*")
_TOKEN = re.compile(r"L[a-z]n?\d+E|[STE]\d*_|(\d+)(?=[A-Za-z_])")
"""A literal, a reference to an earlier part, or the length of an identifier."""
_GIVEN = re.compile(r"\([^()]*\)|<[^<>()]*>")
_TENSILE = re.compile(r"Cijk_\w+?_MT\d+x\d+x\d+")
_GENERAL = re.compile(
    r"(?:(?:vectorized|unrolled|legacy|index)_)*(elementwise|reduce|multi_tensor_apply)_kernel\w*"
)
_HOLLOW = re.compile(r"(device_)?kernel\d?|kentry", re.I)
"""Functions that compute what an argument of their template says, and those whose own names say nothing."""
_WORK = re.compile(
    r"CUDAFunctor\w*?_(\w+)|(plus|minus|multiplies|divides)"
    r"|(?:launch_|gpu_)?(\w+?)_?(?:CUDA|cuda)?_?(?:[Ff]unctor\w*|[Kk]ernel\w*|Ops?)|launch_(\w+)"
)
_WRAPPER = re.compile(r"gpu|Reduce|\w*(Binary|Unary)\w*")


def kernel_name(name: str) -> str:
    """The name in the words of people, on one line of at most ``LONGEST`` characters."""
    return shortened(_spoken(name) or name, LONGEST)


def _spoken(name: str) -> str:
    if mangled := _MANGLED.match(name):
        name = _demangled(name, mangled.end())
    if tensile := _TENSILE.match(name):
        return tensile[0]
    if name.startswith(("Memcpy", "Memset")) or not re.search(r"::|<|\(", name):
        return name
    head, text = "", name
    while head != text:  # what brackets hold, from the innermost on
        head, text = text, _GIVEN.sub("", text)
    path = re.split(r"::|\s", re.split(r"[<(]", head)[0].strip())
    function = path[-1]
    inside = name.partition(f"{function}<")[2]
    if _HOLLOW.fullmatch(function):
        argument = re.match(rf"(?:\w+::)*(\w{{{LONG_WORD},}})", inside)
        return argument[1] if argument else "::".join(path[-2:])
    if general := _GENERAL.fullmatch(function):
        found = (_WORK.fullmatch(word) for word in re.findall(r"[A-Za-z_]\w+", inside))
        works = [next(filter(None, each.groups())) for each in found if each]
        work = next((each for each in works if not _WRAPPER.fullmatch(each)), "")
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", work).replace("_", " ").lower()
        return f"{general[1].replace('_', ' ')} {words}".rstrip()
    return function


def _demangled(name: str, at: int) -> str:
    """``namespace::function<identifier, … of its arguments, long ones first>``."""
    function: list[str] = []
    arguments: list[str] = []
    ended = False
    while token := _TOKEN.search(name, at):
        ended |= bool(function) and token.start() > at
        at = token.end() + int(token[1] or 0)
        if token[1]:
            (arguments if ended else function).append(name[token.end() : at])
    arguments.sort(key=lambda word: len(word) < LONG_WORD)
    return f"{'::'.join(function)}<{', '.join(arguments)}>"

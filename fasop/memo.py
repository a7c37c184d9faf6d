"""Results of a method, kept on its object and no longer than it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def memo(method: Method) -> Method:
    """Compute each result once per object and arguments.

    ``functools.cache`` on a method would keep every object, with all its tables, until the process ends.
    """
    name = f"_memo_{method.__name__}"

    @functools.wraps(method)
    def remembered(self: Any, *arguments: Any) -> Any:
        try:
            return self.__dict__[name][arguments]
        except KeyError:
            found = self.__dict__.setdefault(name, {})[arguments] = method(self, *arguments)
            return found

    return remembered  # type: ignore[return-value]

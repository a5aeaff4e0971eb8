"""The one exception a user's bad input raises, and the checks that raise it for the wrong kind of value."""

from __future__ import annotations

import operator


class Refusal(ValueError):
    """An input the project will not run: one sentence that names the value and the bound it breaks.

    Raised before anything runs, so nothing is half done. The command line prints the sentence and exits with 64.
    """


def whole(name: str, value: object) -> int:
    """`value` as an int, where it is a whole number of any integer type; else a `Refusal` that names it."""
    if isinstance(value, bool):
        raise Refusal(f"{name} {value!r} is not a whole number")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise Refusal(f"{name} {value!r} is not a whole number") from None


def switch(name: str, value: object) -> bool:
    """`value` where it is True or False; else a `Refusal` that names it."""
    if not isinstance(value, bool):
        raise Refusal(f"{name} {value!r} is not True or False")
    return value


def word(name: str, value: object) -> str:
    """`value` where it is a string; else a `Refusal` that names it."""
    if not isinstance(value, str):
        raise Refusal(f"{name} {value!r} is not a string")
    return value

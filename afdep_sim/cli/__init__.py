"""The `afdep` command: one file per verb, imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from afdep_sim.errors import Refusal

BAD_ARGUMENTS = 64
VERBS = {
    "run": "simulate a layout: both arms, phases, published figures beside them",
    "layout": "print where everything lies in a rank's window, and the registered megabytes",
}
"""Verb -> its line of help. Each is a module here with `add_arguments(parser)` and `main(options) -> exit code`."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Bad arguments are one sentence and exit code 64, whoever finds them."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(BAD_ARGUMENTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code. A `Refusal` prints its sentence and gives 64."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(prog="afdep", description="Attention-FFN disaggregation: one protocol text, simulated.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    asked = arguments[0] if arguments else ""
    for verb, line in VERBS.items():
        sub = verbs.add_parser(verb, help=line, description=line)
        if verb == asked:
            module = import_module(f"afdep_sim.cli.{verb}")
            module.add_arguments(sub)
            sub.set_defaults(main=module.main)
    options = parser.parse_args(arguments)
    try:
        return int(options.main(options))
    except Refusal as refusal:
        print(f"afdep: {refusal}", file=sys.stderr)
        return BAD_ARGUMENTS
    except BrokenPipeError:
        return 0

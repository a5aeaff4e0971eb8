"""Every claim of the README that can be executed is: its Python blocks, its make verbs and its command-line options."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from afdep_sim import Protocol, Topology, Workload, simulate

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BLOCKS = [
    pytest.param(match[1], id=f"line {README[: match.start()].count(chr(10)) + 1}")
    for match in re.finditer(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
]


def code(text: str) -> str:
    """The code of a page: its fenced blocks and inline spans, prose left out; continued lines are joined."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose)]
    return "\n".join([*fenced, *spans]).replace("\\\n", " ")


def commands(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(verb, options) of every `afdep VERB ...` in `text`."""
    return [
        (match[1], tuple(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", match[2])))
        for match in re.finditer(r"(?:^|[\s/])afdep ([a-z]+)\b([^\n#]*)", text, re.MULTILINE)
    ]


@cache
def help_of(verb: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "afdep_sim", verb, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_has_python_blocks():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_python_block_runs(block: str, tmp_path: Path):
    """In a process and a folder of its own, as a reader would run it."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{block}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for line in block.splitlines():
        if line.startswith("print(") and "  # " in line:
            assert line.split("  # ", 1)[1] in result.stdout.splitlines()


def test_every_make_verb_exists_and_is_helped():
    mentioned = set(re.findall(r"\bmake ([a-z-]+)\b", code(README)))
    assert {"run", "test", "help"} <= mentioned
    helped = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
    assert mentioned <= helped
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == helped


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        pytest.param(*command, id=f"{where}: afdep {command[0]}")
        for where, text in (("README", code(README)), ("Makefile", MAKEFILE.replace("\\\n", " ")))
        for command in commands(text)
    ],
)
def test_every_command_line_exists(verb: str, options: tuple[str, ...]):
    text = help_of(verb)
    for option in options:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"afdep {verb} has no {option}"


def test_commands_are_found_where_they_are_written():
    text = "run `afdep run 2A2F --tokens 1` or\n```\nafdep trace \\\n  --csv x  # --no\n```\nthe afdep command"
    assert sorted(commands(code(text))) == [("run", ("--tokens",)), ("trace", ("--csv",))]


def test_the_table_says_what_the_model_gives():
    """Two rows of each arm, so that a change of the model cannot leave the README behind."""
    lines = [line.split() for line in README.splitlines()]
    shown = {(line[0], line[1]): line[2] for line in lines if len(line) > 5 and line[1] in ("afdep", "fastafd_m2n")}
    for tokens in (1, 32):
        for arm in ("afdep", "fastafd_m2n"):
            result = simulate(Topology.parse("2A2F"), Workload(tokens=tokens), Protocol.parse(arm))
            assert shown[str(tokens), arm] == f"{result.round_trip_us:.2f}"

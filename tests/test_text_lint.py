"""The lint over the protocol text: every rule reports a planted violation in its line; the shipped text is clean."""

from __future__ import annotations

import textwrap

import pytest

from afdep_sim.kernels.lint import MAX_GUARDS, check_source, check_text, text_files

GOOD = '''
"""A kernel."""

from __future__ import annotations

from afdep_sim.kernels import phases as ph
from afdep_sim.kernels.barrier import make_barrier


def make_kernel(ops, c):
    """A factory."""
    sends = c.sends
    wide = c.topk > 4
    words = c.words["counts"]
    barrier = make_barrier(ops, c)

    @ops.device
    def helper(ctx, rows):
        total = 0
        for row in range(rows):
            step = row // 2
            total += step
        return total

    def kernel(ctx, window, rank, rows):
        ops.phase(ctx, ph.COMBINE_START)
        first, last = rank * rows, rank * rows + rows
        while first < last:
            first += 1
            if first == 3:
                continue
        if sends:
            region = first
        else:
            region = last
        factor = region if wide else 1
        if rank == 0:
            target = helper(ctx, factor)
            ops.store_relaxed(window + words, target)
        else:
            return
        barrier(ctx, window, target, ph.COMBINE_END)

    return kernel
'''


def inner(body: str, constants: str = "sends = c.sends; receives = c.receives") -> str:
    """A file with one kernel of (ctx, rows, block) whose first line, of `body`, is line 6."""
    lines = textwrap.indent(body.strip("\n"), " " * 8)
    head = f"def make_kernel(ops, c):\n    {constants}\n\n\n    def kernel(ctx, rows, block):\n"
    return f"{head}{lines}\n\n    return kernel\n"


def lines_of(source: str) -> list[int]:
    return [int(problem.split(":")[1]) for problem in check_source(source, "text.py")]


def test_the_shipped_text_is_clean():
    names = {path.name for path in text_files()}
    assert {"barrier.py", "combine.py", "copy_epilogue.py", "dispatch.py", "reduce_epilogue.py"} <= names
    assert not names & {"lint.py", "ops.py", "phases.py", "__init__.py"}
    assert check_text() == []


def test_good_text_passes():
    assert check_source(GOOD, "good.py") == []


def test_a_problem_names_file_line_and_what_to_write():
    source = inner("half = rows / 2\nops.store(half)")
    assert check_source(source, "some/text.py") == [
        "some/text.py:6: '/' makes a float of two integers; use '//'."
    ]


# ---- rules of every line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("a = 1\nb = rows / a\nops.use(b)", 7, "'/' makes a float"),
        ("a = rows\na /= 2\nops.use(a)", 7, "'/=' makes a float"),
        ("ops.use(0.5)", 6, "integers only"),
        ("ops.use(1e3)", 6, "integers only"),
        ("ops.use(2j)", 6, "integers only"),
        ("ops.use(1)\nyield rows", 7, "no 'yield'"),
        ("ops.use(1)\nyield from rows", 7, "no 'yield'"),
        ("f = lambda x: x\nops.use(f)", 6, "no 'lambda'"),
        ("ops.use(1)\ntry:\n    ops.use(2)\nfinally:\n    ops.use(3)", 7, "no 'try'"),
        ("a = [i for i in range(rows)]\nops.use(a)", 6, "no comprehension"),
        ("a = {i: i for i in range(rows)}\nops.use(a)", 6, "no comprehension"),
        ("ops.use(sum(i for i in range(rows)))", 6, "no comprehension"),
        ("import numba\nops.use(1)", 6, "not numba"),
        ("rows.sort()", 6, "'.sort'"),
        ("ops.use(ctx.peer)", 6, "'.peer'"),
        ("ops.use(ops.table.first)", 6, "'.first'"),
        ("ops.use(c.topk)", 6, "read it into a variable of the factory"),
        ("ops = rows", 6, "'ops' names what the factory received"),
        ("with rows:\n    ops.use(1)", 6, "no statement of a kernel function"),
        ("raise rows", 6, "no statement of a kernel function"),
        ("assert rows", 6, "no statement of a kernel function"),
        ("def helper():\n    return 1\nops.use(helper())", 6, "no statement of a kernel function"),
        ("if (a := rows) > 1:\n    ops.use(1)", 6, "':='"),
    ],
)
def test_a_violation_in_a_kernel_is_reported_in_its_line(body, line, words):
    problems = check_source(inner(body), "text.py")
    assert any(problem.startswith(f"text.py:{line}: ") and words in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("import numpy as np", 1, "not numpy"),
        ("x = 1\nfrom numba import cuda", 2, "not numba"),
        ("from afdep_sim.model import machine", 1, "not afdep_sim.model"),
        ("from afdep_sim import kernels", 1, "not afdep_sim"),
        ("from afdep_sim.kernels_extra import x", 1, "not afdep_sim.kernels_extra"),
        ("from . import phases", 1, "relative import"),
        ("from afdep_sim.kernels import cuda", 1, "not protocol text"),
        ("from afdep_sim.kernels.cuda.ops import x", 1, "not protocol text"),
        ("from afdep_sim.kernels.ops import x", 1, "not protocol text"),
        ("def make(ops, c):\n    half = c.topk / 2\n    return half", 2, "'/' makes a float"),
        ("def make(ops, c):\n    return ops.device(c.words.counts)", 2, "'.counts'"),
        ("def make(ops, c):\n    def kernel(c):\n        return 1\n    return kernel", 2, "'c' names what"),
        ("def make(ops, c):\n    c = 1\n    return c", 2, "'c' names what"),
        ("def make(:", 1, "not Python"),
        ("async def make(ops, c):\n    return 1", 1, "no 'async'"),
    ],
)
def test_a_violation_elsewhere_is_reported_in_its_line(source, line, words):
    problems = check_source(source, "text.py")
    assert len(problems) == 1
    assert problems[0].startswith(f"text.py:{line}: ")
    assert words in problems[0]


def test_the_factory_may_read_constants_and_decorate():
    source = "def make(ops, c):\n    @ops.device\n    def f(x=c.topk):\n        return x\n    return f"
    assert check_source(source, "text.py") == []


def test_problems_come_in_line_order_and_once():
    source = inner("a = rows / 2 / 3\nops.use(a.x)\nops.use(b)\nb = 1")
    assert lines_of(source) == [6, 7, 8]


# ---- definite assignment --------------------------------------------------------------------------------------------

UNASSIGNED = {
    "one path of an if": ("if rows > 1:\n    a = 1\nops.use(a)", [8]),
    "one path of an elif": ("if rows > 1:\n    a = 1\nelif rows > 0:\n    pass\nelse:\n    a = 2\nops.use(a)", [12]),
    "before its assignment": ("ops.use(a)\na = 1", [6]),
    "a loop may run zero times": ("for i in range(rows):\n    a = i\nops.use(a)", [8]),
    "nor does its variable outlive it": ("for i in range(rows):\n    ops.use(i)\nops.use(i)", [8]),
    "a while may run zero times": ("while rows > block:\n    a = 1\n    block += 1\nops.use(a)", [9]),
    "assigned behind a continue": (
        "for i in range(rows):\n    if i == 1:\n        continue\n    a = i\nops.use(a)",
        [10],
    ),
    "not in the turn that breaks": (
        "while True:\n    if rows > 1:\n        break\n    a = 1\nops.use(a)",
        [10],
    ),
    "read in the first turn": ("for i in range(rows):\n    if i > 0:\n        ops.use(a)\n    a = i", [8]),
    "augmented before it is assigned": ("if rows > 1:\n    a = 0\na += 1\nops.use(a)", [8]),
    "annotated without a value": ("a: int\nops.use(a)", [7]),
    "under a constant, read without": ("if sends:\n    a = 1\nops.use(a)", [8]),
    "under a constant, read under its opposite": ("if sends:\n    a = 1\nif not sends:\n    ops.use(a)", [9]),
    "under a constant, read under another": ("if sends:\n    a = 1\nif receives:\n    ops.use(a)", [9]),
    "under a constant and a run-time test": (
        "if sends:\n    if rows > 1:\n        a = 1\nif sends:\n    ops.use(a)",
        [10],
    ),
    "a constant with a run-time part": ("if sends and rows > 1:\n    a = 1\nif sends:\n    ops.use(a)", [9]),
    "under either constant, read under one": ("if sends and receives:\n    a = 1\nif sends:\n    ops.use(a)", [9]),
    "a parameter is no constant": ("if block:\n    a = 1\nif block:\n    ops.use(a)", [9]),
    "in one arm of a ternary": ("if sends:\n    a = 1\nb = a if receives else 0\nops.use(b)", [8]),
    "in a return": ("if rows:\n    a = 1\nreturn a", [8]),
    "in a loop's bound": ("if rows:\n    a = 1\nfor i in range(a):\n    ops.use(i)", [8]),
    "through a tuple": ("if rows:\n    a, b = 1, 2\nops.use(a, b)", [8, 8]),
}


@pytest.mark.parametrize("case", UNASSIGNED)
def test_a_variable_assigned_on_one_path_is_reported_where_it_is_read(case):
    body, lines = UNASSIGNED[case]
    problems = check_source(inner(body), "text.py")
    assert lines_of(inner(body)) == lines, problems
    assert all("is read here but not assigned on every path" in problem for problem in problems)


ASSIGNED = {
    "both paths": "if rows > 1:\n    a = 1\nelse:\n    a = 2\nops.use(a)",
    "the other path returns": "if rows > 1:\n    a = 1\nelse:\n    return\nops.use(a)",
    "the other path leaves the turn": (
        "for i in range(rows):\n    if i > 1:\n        a = 1\n    else:\n        continue\n    ops.use(a)"
    ),
    "before the loop": "a = 0\nfor i in range(rows):\n    a = a + i\nops.use(a)",
    "in every turn that breaks": "while True:\n    a = 1\n    if rows > 1:\n        break\nops.use(a)",
    "in the else of a loop and at its break": (
        "for i in range(rows):\n    if i == 3:\n        a = i\n        break\nelse:\n    a = 0\nops.use(a)"
    ),
    "under the same constant": "if sends:\n    a = 1\nops.use(1)\nif sends:\n    ops.use(a)",
    "under the same negated constant": "if not sends:\n    a = 1\nif sends:\n    pass\nelse:\n    ops.use(a)",
    "under a constant and its opposite": "if sends:\n    a = 1\nif not sends:\n    a = 2\nops.use(a)",
    "under nested constants": (
        "if sends:\n    if receives:\n        a = 1\nif receives:\n    if sends:\n        ops.use(a)"
    ),
    "under a conjunction of constants": "if sends and receives:\n    a = 1\nif receives and sends:\n    ops.use(a)",
    "under a disjunction of constants": "if sends or receives:\n    a = 1\nif sends:\n    ops.use(a)",
    "under a constant and more": "if sends:\n    a = 1\nif rows > 1 and sends:\n    ops.use(a)",
    "in the arm of a ternary that is left": "if sends:\n    a = 1\nb = a if sends else 0\nops.use(b)",
    "behind the constant in a conjunction": "if sends:\n    a = 1\nif sends and a == 1:\n    ops.use(a)",
    "in a loop that a constant prunes": "if sends:\n    a = 1\nwhile sends:\n    ops.use(a)\n    break",
    "a pruned return": "if sends:\n    a = 1\nelse:\n    return\nif receives:\n    ops.use(a)",
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_a_variable_assigned_on_every_path_passes(case):
    assert check_source(inner(ASSIGNED[case]), "text.py") == []


def test_constants_beyond_the_bound_count_as_run_time_tests():
    """Stricter, never laxer: with more constants than are enumerated, the last ones prune nothing."""
    many = MAX_GUARDS + 1
    constants = "; ".join(f"g{i:02} = c.g{i:02}" for i in range(many))
    body = "".join(f"if g{i:02}:\n    a{i:02} = 1\nif g{i:02}:\n    ops.use(a{i:02})\n" for i in range(many))
    problems = check_source(inner(body, constants), "text.py")
    assert len(problems) == 1
    assert f"'a{MAX_GUARDS:02}' is read here" in problems[0]

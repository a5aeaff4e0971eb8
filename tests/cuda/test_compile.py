"""Every kernel of the text compiles for sm_90 without a GPU, and the machine code is what the design asks for."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from afdep_sim.plan import MBARRIER_BYTES, Plan, build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.topology import Topology
from afdep_sim.workload import Workload

pytest.importorskip("numba.cuda", reason="Numba for CUDA is not installed: make test-cuda has it")

from afdep_sim.kernels.cuda import compile as build_module
from afdep_sim.kernels.cuda.compile import (
    Built,
    Variant,
    build,
    compile_variant,
    machine_code,
    native_digest,
    variants,
)
from afdep_sim.kernels.cuda.reduction import shape

MOST_VARIANTS = 80
ALL = ("dispatch", "copy_epilogue", "combine", "reduce_epilogue")
PHASES_OF_TRANSPORT = ("dispatch", "combine")

CASES: tuple[tuple[str, str, dict[str, Any], tuple[str, ...]], ...] = (
    ("2A2F", "afdep", {}, ALL),
    ("2A2F", "fastafd_m2n", {}, ALL),
    ("2A2F", "afdep+AFDEP_KEEP_ENTRY_BARRIERS=1", {}, PHASES_OF_TRANSPORT),
    ("2A2F", "afdep+AFDEP_UNION_NOTIFY=1", {}, ("dispatch",)),
    ("2A2F", "afdep+AFDEP_ALL_RANK_EXIT=1", {}, PHASES_OF_TRANSPORT),
    ("2A2F", "afdep+AFDEP_GRID_SYNC_EXIT=1", {}, PHASES_OF_TRANSPORT),
    ("2A2F", "afdep+AFDEP_UNION_BUFFERS=1", {}, ("dispatch",)),
    ("3A1F", "afdep", {}, ("combine",)),
    ("3A1F", "afdep+AFDEP_UNION_REDUCE_PREFIX=1", {}, ("combine",)),
    ("3A1F", "afdep+COLLECT_VIEW", {}, ("dispatch",)),
    ("2A2F", "afdep+dev:topk_layout", {}, ("combine", "reduce_epilogue")),
    ("2A2F", "afdep", {"dtype": "fp8", "hidden": 7168}, ALL),
    ("2A2F", "fastafd_m2n", {"dtype": "fp8", "hidden": 4096}, ALL),
    ("2A2F", "afdep", {"dtype": "fp8", "expanded": False}, ("copy_epilogue",)),
    ("2A2F", "afdep", {"expanded": False}, ("copy_epilogue", "combine")),
    ("2A2F", "afdep", {"expanded": False, "combine_weights": True}, ("combine", "reduce_epilogue")),
    (
        "2A2F",
        "afdep+dev:topk_layout",
        {"expanded": False, "combine_weights": True, "bias": 2},
        ("combine", "reduce_epilogue"),
    ),
    ("1A1F", "afdep", {"bias": 1}, ("reduce_epilogue",)),
    ("1A1F", "afdep", {"bias": 2}, ("reduce_epilogue",)),
    ("1A1F", "afdep", {"bias": 2, "hidden": 7168}, ("combine", "reduce_epilogue")),
    ("1A1F", "afdep", {"bias": 1, "hidden": 5120}, ("combine", "reduce_epilogue")),
    ("1A1F", "afdep", {"host_counts": True, "expert_alignment": 16}, ("dispatch",)),
    ("2A2F", "fastafd_m2n", {"host_counts": True}, ("dispatch",)),
    ("2A2F", "afdep", {"hidden": 256, "topk": 1}, ALL),
    ("3A1F", "afdep", {"hidden": 512, "topk": 32}, ALL),
)


def plan_of(layout: str, arm: str, workload: dict[str, Any]) -> Plan:
    work = Workload(**{"tokens": 33, "hidden": 2048, **workload})
    return build_plan(Topology.parse(layout), work, Protocol.parse(arm))


def listed() -> dict[Variant, str]:
    found: dict[Variant, str] = {}
    for layout, arm, workload, kernels in CASES:
        for variant in variants(plan_of(layout, arm, workload)):
            if variant.kernel in kernels:
                role = "sends" * variant.constants.sends + "receives" * variant.constants.receives
                settings = ",".join(f"{name}={value}" for name, value in workload.items())
                found.setdefault(variant, "-".join(filter(None, (variant.kernel, role, layout, arm, settings))))
    first = plan_of("2A2F", "afdep", {})
    found.update({v: f"{v.kernel}-trace-{v.constants.sends}" for v in variants(first, trace=True)})
    return found


LISTED = listed()
each = pytest.mark.parametrize("variant", list(LISTED), ids=list(LISTED.values()))


def loops(ptx: str) -> Iterator[list[str]]:
    """The lines between each label and a later branch back to it."""
    lines = ptx.splitlines()
    labels = {line.strip().rstrip(":"): at for at, line in enumerate(lines) if re.match(r"\$L\w+:", line)}
    for at, line in enumerate(lines):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", line)
        if target and labels.get(target[1], at) < at:
            yield lines[labels[target[1]] : at + 1]


def instructions(ptx: str) -> set[str]:
    """Opcodes with their modifiers, those inside braces too."""
    return set(re.findall(r"(?<![\w.%])(?:ld|st|red|atom|fence|membar|cp|mbarrier)\.[\w.:]+", ptx))


# ---- the listed kernels ----------------------------------------------------------------------------------------------


def test_the_list_covers_every_constant_in_each_of_its_states_and_stays_small():
    assert len(LISTED) <= MOST_VARIANTS
    used = [variant.constants for variant in LISTED]
    for name in ("expanded", "rank_layout", "combine_weights", "host_counts", "sends", "receives", "sends_counts"):
        assert {getattr(c, name) for c in used} == {False, True}, name
    for name in ("receives_counts", "union_counts", "entry_barrier", "exit_all_ranks", "exit_grid", "check_routes"):
        assert {getattr(c, name) for c in used} == {False, True}, name
    assert {c.zero_view for c in used} == {False, True}
    assert {c.packs > 0 for c in used} == {False, True}
    assert {c.bias for c in used} == {0, 1, 2}
    assert {variant.kernel for variant in LISTED} == set(ALL)


@each
def test_it_compiles_for_its_block_size_without_a_spill(variant):
    built = build(variant)
    assert (built.stack, built.spills) == (0, 0)
    assert 0 < built.registers <= variant.registers
    # All of a block's shared memory is dynamic: the plan hands out the most a block may have.
    assert built.static_shared == 0


@each
def test_nothing_is_left_to_resolve(variant):
    ptx = build(variant).ptx
    assert ".extern .func" not in ptx
    assert not re.search(r"\bcall(\.uni)?\b", ptx)
    assert ptx.count(".entry") == 1


@each
def test_no_integer_became_a_float(variant):
    ptx = build(variant).ptx
    assert ".f64" not in ptx
    assert not re.search(r"\b(?:div|rcp|sqrt)\.\w*\.?f32", ptx)
    if variant.kernel in ("dispatch", "copy_epilogue"):
        assert ".f32" not in ptx


@each
def test_polls_acquire_or_are_volatile(variant):
    polls = [loop for loop in loops(build(variant).ptx) if any("%globaltimer" in line for line in loop)]
    inner = [a for a in polls if not any(len(b) < len(a) and set(b) <= set(a) for b in polls)]
    for loop in inner:
        kinds = {kind for line in loop for kind in instructions(line) if kind.startswith("ld.") and "global" in kind}
        polled = {"ld.acquire.gpu.global.s64", "ld.acquire.sys.global.s64", "ld.volatile.global.s64"}
        assert kinds & polled
        # What else a poll reads is the context block and the caller's own operands, never a relaxed word.
        assert not any("relaxed" in kind for kind in kinds)


@each
def test_words_of_peers_have_system_scope(variant):
    c, found = variant.constants, instructions(build(variant).ptx)
    assert not found & {"red.global.add.u64", "atom.global.add.u64", "membar.gl"}
    releases = {kind for kind in found if "release" in kind and kind.startswith(("red", "st", "atom"))}
    assert releases <= {"red.release.sys.global.add.u64"}
    transport = variant.kernel in PHASES_OF_TRANSPORT
    if transport and c.sends:
        assert "red.release.sys.global.add.u64" in found
    if transport and c.receives:
        assert "ld.acquire.sys.global.s64" in found
    # GPU scope acquires one word only: the grid synchronisation's.
    waits_for_grid = c.entry_barrier or c.exit_all_ranks or (c.exit_grid and c.sends)
    assert ("ld.acquire.gpu.global.s64" in found) == (transport and waits_for_grid)
    if variant.kernel == "dispatch" and c.sends_counts:
        assert "st.relaxed.sys.global.s64" in found


@each
def test_bulk_copies_and_launch_dependencies_are_there(variant):
    ptx = build(variant).ptx
    early = variant.kernel in ("copy_epilogue", "reduce_epilogue")
    assert ("griddepcontrol.wait" in ptx) == early
    assert ("griddepcontrol.launch_dependents" in ptx) != early
    if early or variant.constants.sends:
        assert "cp.async.bulk.global.shared::cta.bulk_group" in ptx
        # Complete, not only read.
        assert "cp.async.bulk.wait_group 0" in ptx
        assert "wait_group.read" not in ptx


def test_counters_and_stages_lie_apart_in_shared_memory():
    for layout, arm, workload, _ in CASES:
        plan = plan_of(layout, arm, workload)
        for launch in (launch for stream in plan.exchanges[0].streams for launch in stream):
            c = launch.constants
            row = {"combine": c.combine_row_bytes, "reduce_epilogue": c.hidden_bytes}.get(
                launch.kernel, c.dispatch_row_bytes
            )
            experts = plan.workload.experts_per_rank(plan.topology)
            counters, stages = 0, launch.warps
            if launch.kernel == "dispatch":
                counters, stages = 4 * plan.topology.ranks * (1 + experts), launch.warps - c.notify_warps
            assert counters + stages * (row + MBARRIER_BYTES) <= launch.shared_bytes
            assert row % 32 == 0
            assert launch.shared_bytes % 128 == 0


# ---- marks, digests, the cache ---------------------------------------------------------------------------------------


@pytest.fixture
def small() -> Variant:
    (found,) = (v for v in variants(plan_of("2A2F", "afdep", {})) if v.kernel == "combine" and v.constants.receives)
    return found


def test_a_mark_is_no_code_unless_traced():
    plan = plan_of("2A2F", "afdep", {})
    (plain,) = (build(v) for v in variants(plan) if v.kernel == "copy_epilogue")
    (traced,) = (build(v) for v in variants(plan, trace=True) if v.kernel == "copy_epilogue")
    assert "%globaltimer" not in plain.ptx
    assert traced.ptx.count("red.relaxed.gpu.global.min.s64") == 3


def test_machine_code_does_not_depend_on_what_was_compiled_before(small):
    first, second = compile_variant(small), compile_variant(small)
    assert first.digest == second.digest
    assert len(machine_code(first.cubin)) >= 2
    # Numba numbers what it compiles, and the symbol shows it.
    assert first.entry != second.entry


def test_the_digest_tells_arms_apart_and_sees_that_two_are_the_same():
    one = plan_of("2A2F", "afdep", {})
    assert native_digest(one) == native_digest(plan_of("2A2F", "afdep+AFDEP_UNION_REDUCE_PREFIX=1", {}))
    assert native_digest(one) != native_digest(plan_of("2A2F", "fastafd_m2n", {}))


def test_the_key_holds_constants_threads_and_trace(small):
    others = [
        Variant("combine", small.constants, small.threads, trace=True),
        Variant("combine", small.constants, small.threads // 2),
        Variant("dispatch", small.constants, small.threads),
    ]
    assert len({small.key, *(other.key for other in others)}) == 4


def test_a_cached_kernel_is_read_back_and_a_broken_one_is_built_again(small, tmp_path, monkeypatch):
    monkeypatch.setenv("AFDEP_SIM_CACHE", str(tmp_path / "kernels"))
    first = build(small)
    (path,) = (tmp_path / "kernels").iterdir()
    assert zipfile.is_zipfile(path)
    monkeypatch.setattr(build_module, "compile_variant", lambda variant: pytest.fail(f"compiled {variant}"))
    assert build(small) == first
    monkeypatch.setattr(build_module, "compile_variant", lambda variant: first)
    path.write_bytes(path.read_bytes()[:100])
    assert build(small) == first
    assert zipfile.is_zipfile(path)


@pytest.mark.parametrize(
    ("threads", "registers"), [(1024, 64), (896, 72), (832, 72), (704, 80), (512, 128), (128, 255)]
)
def test_registers_fit_the_block(small, threads, registers):
    assert Variant("combine", small.constants, threads).registers == registers


def test_a_reduction_keeps_no_more_in_flight_than_it_has_registers_for():
    for registers in (64, 72, 80, 128, 255):
        for prefix in range(1, 33):
            for units in (1, 2, 3, 4, 8, 28):
                wide, batch = shape(units, prefix, registers)
                assert units % wide == 0
                assert 4 * wide * batch + 8 * wide < registers


def test_what_is_built_says_what_it_takes(small):
    built = build(small)
    assert isinstance(built, Built)
    assert built.cubin.startswith(b"\x7fELF")
    assert built.entry in built.ptx

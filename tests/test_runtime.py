"""The GPU runtime where no GPU is: residency, the error record, the host's steps, the experts' arithmetic."""

from __future__ import annotations

import copy
import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from afdep_sim.arena import Arena, output_rows, received, received_place
from afdep_sim.errors import Refusal
from afdep_sim.kernels import phases as ph
from afdep_sim.kernels.cuda.context import RECORD, ROUTE, TIMEOUT, TRACE_NEVER, TRACE_WARPS
from afdep_sim.model.machine import Machine
from afdep_sim.model.profiles import load_profile
from afdep_sim.plan import HOPPER, Plan, build_plan
from afdep_sim.protocol import Protocol
from afdep_sim.reference import Mismatch, exchange_bias, expert_partials, expert_rows, expert_scale
from afdep_sim.runtime import device_code, kernels, loopback
from afdep_sim.runtime.loopback import LoopbackMachine
from afdep_sim.runtime.residency import blocks_per_sm, check_residency, loopback_plan, residency
from afdep_sim.runtime.watchdog import GpuError, RouteError, WaitTimeout, explain, word_name
from afdep_sim.topology import Topology
from afdep_sim.window import WORD_OFFSETS, WORKSPACE_BYTES
from afdep_sim.workload import MAX_EXPERTS, Workload

ROOT = Path(__file__).resolve().parent.parent


def plan_of(layout: str = "2A2F", arm: str = "afdep", sms: int = 24, tokens: Any = 5, **options: Any) -> Plan:
    plan_options = {k: options.pop(k) for k in ("exchanges", "experts", "edges") if k in options}
    work = Workload(tokens=tokens, **{"hidden": 256, **options})
    return loopback_plan(Topology.parse(layout), work, Protocol.parse(arm, sms), **plan_options)


# ---- residency -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "sms", "early"), [("2A2F", 24, 9), ("1A1F", 24, 42), ("3A2F", 24, 2), ("2A2F", 33, 0), ("4A2F", 22, 0)]
)
def test_epilogues_share_what_the_transport_grids_leave(layout, sms, early):
    plan = plan_of(layout, sms=sms)
    found = check_residency(plan)
    assert (found.early, found.per_sm, found.room) == (early, 1, 132)
    assert found.needed == plan.topology.ranks * (sms + early) <= 132
    epilogues = [la for stream in plan.exchanges[0].streams for la in stream if not la.cooperative]
    assert {la.grid for la in epilogues} == {early or 132}
    assert {la.programmatic for la in epilogues} == {early > 0}


def test_plain_edges_take_every_sm_and_keep_none_waiting():
    plan = plan_of(edges="plain")
    assert residency(plan).early == 0
    assert {la.grid for stream in plan.exchanges[0].streams for la in stream if not la.cooperative} == {132}


def test_what_does_not_fit_is_refused_with_the_reason():
    with pytest.raises(
        Refusal, match="4 ranks of 34 transport blocks are 136 blocks .* over the 132 that 132 SMs hold"
    ):
        plan_of(sms=34)
    with pytest.raises(Refusal, match="leave no SM of 132 per rank"):
        plan_of(sms=33, edges="programmatic")
    with pytest.raises(Refusal, match="edges 'none' is not"):
        plan_of(edges="none")
    whole = build_plan(Topology.parse("2A2F"), Workload(tokens=1, hidden=256), Protocol.afdep())
    with pytest.raises(Refusal, match="24 transport blocks and 132 early epilogue blocks are 624 blocks"):
        check_residency(whole)
    with pytest.raises(Refusal, match="over the 66 that 66 SMs hold"):
        check_residency(plan_of(), sms=66)


def test_an_sm_holds_as_many_blocks_as_the_largest_of_them_allow():
    launches = plan_of().exchanges[0].streams[0]
    assert blocks_per_sm(launches, HOPPER) == 1
    small = [SimpleNamespace(shared_bytes=100_000, threads=512, registers=64) for _ in range(2)]
    assert blocks_per_sm(small, HOPPER) == 2


def test_epilogue_grids_of_a_plan_are_bounded():
    with pytest.raises(Refusal, match="epilogue SMs 133 is outside 0 to the device's 132"):
        build_plan(Topology.parse("1A1F"), Workload(tokens=1), Protocol.afdep(), epilogue_sms=133)


# ---- the error record ------------------------------------------------------------------------------------------------

CONTEXTS, WINDOWS, ARENA = [0x1000, 0x2000], [0x10_0000, 0x90_0000], 0x40_0000


def said(*record: int) -> GpuError:
    error = explain(record, CONTEXTS, WINDOWS, ARENA, 2_000_000_000)
    assert error is not None
    return error


def test_a_clean_record_is_no_error():
    assert explain([0] * len(RECORD), CONTEXTS, WINDOWS, ARENA, 1) is None


def test_a_timeout_names_who_waits_where_for_what():
    word = WINDOWS[1] + WORD_OFFSETS["combine_arrivals"] + 8 * 3
    error = said(TIMEOUT, ph.COMBINE_ARRIVAL, word, 23, 24, 7, 65, 0x2000)
    assert isinstance(error, WaitTimeout)
    assert str(error) == (
        "rank 1 block 7 warp 2: over 2000 ms in 'combine arrival' for combine_arrivals[3] of rank 1: saw 23, wanted 24"
    )


def test_a_count_that_did_not_come_is_asked_for_in_words():
    word = WINDOWS[0] + WORD_OFFSETS["counts"]
    assert "counts[0] of rank 0: saw 0, wanted anything but 0" in str(
        said(TIMEOUT, ph.DISPATCH_COUNT_WAIT, word, 0, ph.DISPATCH_COUNT_WAIT, 0, 5, 0x1000)
    )
    reduction = WINDOWS[0] + WORD_OFFSETS["count_reduction"]
    assert "wanted 24 blocks in its upper half (3 seen)" in str(
        said(TIMEOUT, ph.DISPATCH_COUNT_REDUCE, reduction, 3 << 32, 24, 0, 5, 0x1000)
    )


def test_a_bad_route_names_token_lane_and_expert():
    error = said(ROUTE, 20, 5, 128, 128, 3, 37, 0x2000)
    assert isinstance(error, RouteError)
    assert str(error) == "rank 1 block 3 warp 1: token 20 lane 5 names expert 128 of 128, or one named before"


def test_records_of_no_known_kind_rank_or_place_are_still_told():
    assert "of no known kind" in str(said(9, 0, 0, 0, 0, 0, 0, 0x1000))
    text = str(said(TIMEOUT, 99, 0x5, 0, 1, 0, 0, 0x9999))
    assert text.startswith("rank ? ")
    assert "phase 99" in text
    assert "address 0x5" in text
    assert word_name(WORKSPACE_BYTES) == f"byte {WORKSPACE_BYTES} of the arena"


# ---- imports ---------------------------------------------------------------------------------------------------------


def test_the_runtime_imports_no_gpu_package():
    code = (
        "import sys, afdep_sim.runtime.loopback, afdep_sim.runtime.kernels, afdep_sim.runtime.gpu;"
        "print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'cupy', 'numba')])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_cuda_is_told_to_load_eagerly_before_it_starts(monkeypatch):
    for name in ("CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    LoopbackMachine()
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


# ---- the host's steps, on a stand-in for the GPU ---------------------------------------------------------------------


class FakeGpu:
    """Host memory at its own addresses, everything at once; launches are written down and do nothing."""

    name, sms = "fake", 132

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.log: list[Any] = []
        self.time_us = 0.0

    @contextmanager
    def pool(self) -> Iterator[FakeGpu]:
        yield self

    def allocate(self, size: int) -> int:
        block = np.zeros(max(size, 256), np.uint8)
        self.memory[block.ctypes.data] = block
        return int(block.ctypes.data)

    def store(self, values: np.ndarray) -> int:
        address = self.allocate(values.nbytes)
        self.upload(address, values)
        return address

    def at(self, address: int, size: int) -> np.ndarray:
        for base, block in self.memory.items():
            if base <= address and address + size <= base + len(block):
                return block[address - base :][:size]
        raise AssertionError(f"{size} bytes at {address:#x} are in no allocation")

    def upload(self, address: int, values: np.ndarray) -> None:
        self.at(address, values.nbytes)[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def download(self, address: int, size: int) -> np.ndarray:
        return self.at(address, size).copy()

    def copy(self, stream: Any, destination: int, source: int, size: int) -> None:
        self.at(destination, size)[:] = self.at(source, size)
        self.log.append((stream, "copy"))

    def fill(self, stream: Any, address: int, value: int, count: int, row_bytes: int, stride: int) -> None:
        for row in range(count):
            self.at(address + row * stride, row_bytes).view(np.uint16)[:] = value
        self.log.append((stream, "fill"))

    def stream(self) -> Any:
        return object()

    def event(self) -> list[float]:
        return [0.0]

    def record(self, event: list[float], stream: Any, external: bool = False) -> None:
        self.time_us += 1.0
        event[0] = self.time_us
        self.log.append((stream, "event", external))

    def elapsed_us(self, first: list[float], last: list[float]) -> float:
        return last[0] - first[0]

    def graph(self) -> Any:
        return FakeBuilder(self)

    def synchronize(self) -> None:
        pass

    def load(self, code: Any, entry: str, shared_bytes: int = 0) -> Any:
        return entry

    def blocks_per_sm(self, kernel: Any, threads: int, shared_bytes: int) -> int:
        return 1

    def launch(self, stream: Any, kernel: Any, grid: int, threads: int, arguments: Any, *rest: Any) -> None:
        assert all(isinstance(value, int) for value in arguments)
        self.log.append((stream, kernel, grid, threads, tuple(arguments), rest))


class FakeBuilder:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def split(self, count: int) -> list[FakeBuilder]:
        return [FakeBuilder(self.gpu) for _ in range(count)]

    @staticmethod
    def join(*branches: FakeBuilder) -> FakeBuilder:
        return branches[0]

    def end_building(self) -> FakeBuilder:
        return self

    def complete(self) -> FakeBuilder:
        return self

    def launch(self, stream: Any) -> None:
        self.gpu.log.append((stream, "graph"))


@pytest.fixture
def fake(monkeypatch) -> FakeGpu:
    gpu = FakeGpu()

    def prepared(plans: Any, trace: bool = False, workers: int = 0) -> Any:
        return {v: SimpleNamespace(cubin=b"", entry=v.kernel, registers=64) for v in kernels.wanted(plans, trace)}

    monkeypatch.setattr(kernels, "prepare_kernels", prepared)
    monkeypatch.setattr(LoopbackMachine, "gpu", property(lambda self: gpu))
    return gpu


def machine(**options: Any) -> LoopbackMachine:
    made = LoopbackMachine(cooperative=True, **options)
    made._extra = {name: name for name in device_code.NAMES}
    return made


def by_stream(gpu: FakeGpu) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for stream, what, *_ in gpu.log:
        found.setdefault(id(stream), []).append(what)
    return list(found.values())


def test_each_rank_runs_its_stream_with_the_experts_before_combine(fake):
    plan = plan_of(exchanges=2, tokens=(5, 0))
    run = machine(received=True, trace=True).run(plan)
    streams = by_stream(fake)
    assert len(streams) == 4
    for rank, log in enumerate(streams):
        launched = [what for what in log if what not in ("copy", "fill")]
        one = (
            ["dispatch", "copy_epilogue", "experts", "combine"]
            if rank < 2
            else ["dispatch", "combine", "reduce_epilogue"]
        )
        assert launched == 2 * one
        assert log.index("fill") == 0
    for number in range(2):
        assert {rank: x.shape for rank, x in run.combined[number].items()} == {2: (5, 256), 3: (0, 256)}
        assert (run.combined[number][2] == 0x7FC0).all()
        assert sorted(run.received[number]) == [0, 1]
    assert [len(words) * 8 for words in run.words] == [WORKSPACE_BYTES] * 4


def test_launches_carry_the_plans_shapes_and_addresses(fake):
    plan = plan_of()
    machine().run(plan)
    launches = [entry for entry in fake.log if len(entry) == 6 and entry[1] != "experts"]
    wanted = [launch for stream in plan.exchanges[0].streams for launch in stream]
    for (_, kernel, grid, threads, arguments, rest), launch in zip(launches, wanted, strict=True):
        assert (kernel, grid, threads) == (launch.kernel, launch.grid, launch.threads)
        assert rest == (launch.shared_bytes, launch.cooperative, launch.programmatic)
        assert len(arguments) == len(launch.arguments)
        context = fake.at(arguments[0], 8 * 7).view(np.int64)
        assert context[1] == 2_000_000_000
        assert context[3 + launch.rank] == arguments[1]


def test_traces_hold_the_marks_of_every_block(fake):
    made = machine(trace=True)
    made.run(plan_of(exchanges=2))
    assert len(made.traces) == 2
    assert {trace.shape for traces in made.traces for trace in traces.values()} == {(24, TRACE_WARPS, len(ph.NAMES))}
    assert (made.traces[1][3] == TRACE_NEVER).all()


def test_precomputed_rows_need_no_experts_kernel_and_the_expanded_layout(fake):
    machine().run(plan_of(experts="precomputed"))
    assert "experts" not in {what for _, what, *_ in fake.log}
    with pytest.raises(Refusal, match="need the expanded layout"):
        machine().run(plan_of(experts="precomputed", expanded=False))


def test_what_a_kernel_reported_is_raised(fake, monkeypatch):
    def fails(self: Any, *rest: Any) -> Any:
        self.gpu.at(self.record, 64).view(np.int64)[:] = [
            TIMEOUT,
            ph.DISPATCH_ARRIVAL,
            self.arenas[1],
            0,
            1,
            0,
            0,
            self.contexts[1],
        ]

    monkeypatch.setattr(loopback._Ranks, "start_experts", fails)
    with pytest.raises(WaitTimeout, match=r"rank 1 .*'dispatch arrival' for barrier_calls\[0\] of rank 1"):
        machine().run(plan_of())


def test_timed_graphs_hold_their_exchanges_and_are_checked(fake, monkeypatch):
    plan = plan_of(experts="precomputed")
    with pytest.raises(Mismatch):
        machine().time_round_trips(plan, 3, 2)
    monkeypatch.setattr(loopback._Ranks, "check", lambda self, sources: 10)
    fake.log.clear()
    timed = machine().time_round_trips(plan, 3, 4, warm_up=1)
    assert timed.us.shape == (4, 2)
    assert timed.slowest_us.shape == timed.whole_us.shape == (4,)
    assert timed.rows_checked == 20
    branches = [log for log in by_stream(fake) if "dispatch" in log]
    assert branches[0] == 3 * ["dispatch", "copy_epilogue", "combine"]
    one = ["dispatch", "combine", "reduce_epilogue"]
    assert branches[2] == [*one, "event", *one, *one, "event"]
    assert machine().time_round_trips(plan, 3, 1, clock="timer").us.shape == (1, 2)


def test_timed_runs_refuse_what_they_cannot_time(fake):
    with pytest.raises(Refusal, match="precomputed"):
        machine().time_round_trips(plan_of())
    with pytest.raises(Refusal, match="exchanges per graph 1 is below 2"):
        machine().time_round_trips(plan_of(experts="precomputed"), 1)
    with pytest.raises(Refusal, match="replays 0 is below 1"):
        machine().time_round_trips(plan_of(experts="precomputed"), 2, 0)


# ---- the experts' arithmetic, compiled for this CPU ------------------------------------------------------------------

SHIM = r"""
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
struct Three { long long x; };
static Three blockIdx = {0}, gridDim = {1}, threadIdx = {0}, blockDim = {1};
static inline unsigned __float_as_uint(float v) { unsigned b; memcpy(&b, &v, 4); return b; }
static inline float __uint_as_float(unsigned b) { float v; memcpy(&v, &b, 4); return v; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
"""


@pytest.fixture(scope="module")
def experts_on_cpu(tmp_path_factory) -> Any:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("experts")
    (folder / "experts.cpp").write_text(SHIM + device_code.EXPERTS)
    command = [compiler, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "experts.cpp", "-o", "experts.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "experts.so")).experts


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", [{}, {"expert_alignment": 16, "dropped_share": 0.3}, {"expanded": False}])
def test_the_experts_kernel_is_the_references_stand_in(experts_on_cpu, fake, dtype, shape):
    plan = plan_of(tokens=(33, 7), exchanges=2, dtype=dtype, hidden=512, **shape)
    kept: dict[tuple[int, int], Any] = {}
    Machine(
        load_profile("H200"), on_received=lambda n, rank, views: kept.update({(n, rank): copy.deepcopy(views)})
    ).run(plan)
    topology, work = plan.topology, plan.workload
    per_rank = work.experts_per_rank(topology)
    with machine()._ranks(plan) as ranks:
        assert (fake.at(ranks.scale_table, 4 * MAX_EXPERTS).view(np.float32) == expert_scale(MAX_EXPERTS)).all()
        for (number, rank), got in kept.items():
            arena = Arena(fake.at(ranks.arenas[rank], plan.arena_bytes))
            arena.view(plan.exchanges[0].window.tensors["psum_rank"].offset, (topology.ranks,), np.int64)[:] = (
                got.psum_rank
            )
            experts = plan.exchanges[0].window.tensors["psum_expert"].offset
            arena.view(experts, (per_rank + 1,), np.int64)[:] = got.psum_expert
            there = received(plan, number, arena)
            for name in ("metadata", "x", "weights", "scales", "topk"):
                if getattr(got, name) is not None:
                    getattr(there, name)[:] = getattr(got, name)
            fake.log.clear()
            ranks.start_experts(number, rank, ranks.streams[rank])
            arguments = fake.log[-1][4]
            experts_on_cpu(*[ctypes.c_int64(value) for value in arguments])
            y_at = plan.exchanges[0].window.tensors["expert_y"].offset
            y = arena.view(y_at, (len(got.x), work.hidden), np.uint16)
            if work.expanded:
                slots = np.sort(got.metadata[:, 2:][got.metadata[:, 2:] >= 0])
                expert = rank * per_rank + np.searchsorted(got.psum_expert[:per_rank], slots, side="right")
                scales = None if got.scales is None else got.scales[slots]
                assert len(slots)
                np.testing.assert_array_equal(
                    y[slots], expert_rows(got.x[slots], expert, got.weights[slots], number, scales)
                )
            else:
                expert = np.where(got.topk < 0, -1, got.topk + rank * per_rank)
                want = expert_partials(topology, work, got.x, got.scales, expert, got.weights, number)
                np.testing.assert_array_equal(y, want)
            assert arguments[-1] == int(exchange_bias(number).view(np.uint32))


def test_the_device_code_compiles_where_nvrtc_is():
    pytest.importorskip("cuda.core")
    code = device_code.compile_device_code().code
    assert all(name.encode() in code for name in device_code.NAMES)


# ---- arenas ----------------------------------------------------------------------------------------------------------


def test_a_piece_of_an_arena_is_viewed_by_the_same_offsets():
    data = np.arange(64, dtype=np.uint8)
    assert Arena(data[16:], 16).view(24, (2, 2), np.uint16).tolist() == Arena(data).view(24, (2, 2), np.uint16).tolist()
    for offset in (8, 62):
        with pytest.raises(IndexError, match=re.escape(f"bytes {offset} to {offset + 8} are outside the 48 from 16")):
            Arena(data[16:], 16).view(offset, (1,), np.int64)


def test_the_view_is_strided_and_received_places_end_behind_what_is_looked_at():
    plan = plan_of("3A1F", "afdep+COLLECT_VIEW", sms=16)
    rows = output_rows(plan, 0, 1)
    assert rows.stride > rows.row_bytes
    assert rows.offset == plan.exchanges[0].window.combine_inbox.offset
    plain, counted = plan_of(), plan_of(host_counts=True)
    assert received_place(counted, 0).size > received_place(plain, 0).size

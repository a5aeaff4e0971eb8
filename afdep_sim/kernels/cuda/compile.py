"""A plan's kernels -> cubins for sm_90, with or without a GPU, kept in a cache; and the digest of what a plan runs.

Numba compiles the text and its operations to LTO-IR, nvJitLink links them to one cubin per (kernel, constants,
threads). ptxas is part of nvJitLink, so registers and spills are known here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from afdep_sim.errors import Refusal
from afdep_sim.kernels import FACTORIES
from afdep_sim.plan import Constants, Launch, Plan

CC = (9, 0)
ARCH = "sm_90"
VERSIONS = ("numba", "numba-cuda", "llvmlite", "cuda-bindings")
"""Packages whose version goes into the key of a cached kernel, beside nvJitLink's own."""


@dataclass(frozen=True)
class Variant:
    """What makes one cubin: a kernel of the text, the constants it closes over, threads per block, trace or not."""

    kernel: str
    constants: Constants
    threads: int
    trace: bool = False

    @classmethod
    def of(cls, launch: Launch, trace: bool = False) -> Variant:
        return cls(launch.kernel, launch.constants, launch.threads, trace)

    @property
    def registers(self) -> int:
        """The most registers per thread with which a block of this size can launch.

        Each of an SM's four quarters has 16,384 of them and takes every fourth warp; eight at a time per thread.
        """
        warps_of_a_quarter = -(-self.threads // 128)
        return min(255, 16_384 // (32 * warps_of_a_quarter) // 8 * 8)

    @cached_property
    def key(self) -> str:
        """Name in the cache: a hash over everything the machine code depends on."""
        constants = {**asdict(self.constants), "words": dict(Constants.words), "inbox": Constants.inbox}
        parts = [self.kernel, self.threads, self.trace, constants, Constants.notify_warps, _toolchain()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode() + _sources()).hexdigest()[:32]


@dataclass(frozen=True)
class Built:
    """A linked kernel. `entry` is its symbol; sizes are per thread, `static_shared` per block, all in bytes."""

    entry: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    cubin: bytes
    ptx: str

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    @cached_property
    def digest(self) -> str:
        """Hash over machine code, without symbol names (Numba's carry counters)."""
        return hashlib.sha256(b"".join(machine_code(self.cubin))).hexdigest()


# ---- building --------------------------------------------------------------------------------------------------------


def build(variant: Variant) -> Built:
    """The kernel of a variant, from the cache or compiled now and kept."""
    path = cache_directory() / f"{variant.key}.zip"
    found = _read(path)
    if found is None:
        found = compile_variant(variant)
        _write(path, found)
    return found


def build_plan_kernels(plan: Plan, trace: bool = False) -> dict[Variant, Built]:
    """Every kernel that some rank launches in some exchange of the plan."""
    return {variant: build(variant) for variant in variants(plan, trace)}


def variants(plan: Plan, trace: bool = False) -> list[Variant]:
    """What must be built for a plan, in the order of ranks and streams, each once."""
    launches = (launch for exchange in plan.exchanges for stream in exchange.streams for launch in stream)
    return list(dict.fromkeys(Variant.of(launch, trace) for launch in launches))


def native_digest(plan: Plan) -> str:
    """What a plan runs, as one hash: machine code and launch shapes in stream order, rank by rank (design section 5).

    Equal across processes and orders of compilation; two arms with the same digest ran the same code.
    """
    built = build_plan_kernels(plan)
    shapes: list[Any] = []
    for exchange in plan.exchanges:
        for stream in exchange.streams:
            for launch in stream:
                shape = (launch.grid, launch.warps, launch.shared_bytes, launch.cooperative, launch.programmatic)
                shapes.append((launch.rank, launch.kernel, built[Variant.of(launch)].digest, shape))
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def compile_variant(variant: Variant) -> Built:
    """Compile and link, past the cache."""
    from numba import cuda
    from numba.cuda import types

    from afdep_sim.kernels.cuda.ops import make_ops

    ops = make_ops(variant.constants, trace=variant.trace, registers=variant.registers)
    factory: Any = FACTORIES[variant.kernel]
    kernel = factory(ops, variant.constants)
    if variant.trace:
        kernel = _with_end(ops, kernel)
    count = kernel.__code__.co_argcount
    with _some_device():
        codes, _ = cuda.compile_all(
            kernel,
            types.void(*[types.int64] * count),
            device=False,
            cc=CC,
            abi="numba",
            output="ltoir",
            launch_bounds=(variant.threads, 1),
        )
    inputs = [code if isinstance(code, bytes) else bytes(code.code) for code in codes]
    cubin, log = _link(inputs, ["-lto", f"-arch={ARCH}", "-Xptxas=-v", f"-maxrregcount={variant.registers}"], "cubin")
    ptx, _ = _link(inputs, ["-lto", f"-arch={ARCH}", "-ptx"], "ptx")
    text = ptx.rstrip(b"\0").decode()
    return Built(entry=_entry(text), cubin=cubin, ptx=text, **_statistics(log))


def _with_end(ops: Any, kernel: Any) -> Any:
    """-> the kernel, followed by a mark of phase 0, which no text opens: the end of the agent."""
    names = ", ".join(kernel.__code__.co_varnames[: kernel.__code__.co_argcount])
    space = {"ops": ops, "text": ops.device(kernel)}
    exec(f"def traced({names}):\n    text({names})\n    ops.phase(ctx, 0)\n", space)
    return space["traced"]


@contextmanager
def _some_device() -> Iterator[None]:
    """Let Numba compile device functions where no GPU is: they ask the current device for its compute capability."""
    import numba.cuda.compiler as compiler
    import numba.cuda.dispatcher as dispatcher
    from numba import cuda

    if cuda.is_available():
        yield
        return
    modules = [module for module in (compiler, dispatcher) if hasattr(module, "get_current_device")]
    kept = [module.get_current_device for module in modules]
    for module in modules:
        module.get_current_device = lambda: SimpleNamespace(compute_capability=CC, name=b"none", id=0)
    try:
        yield
    finally:
        for module, function in zip(modules, kept, strict=True):
            module.get_current_device = function


def _link(inputs: list[bytes], options: list[str], wanted: str) -> tuple[bytes, str]:
    """LTO-IR -> (linked cubin or PTX, the linker's information log)."""
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(len(options), options)
    try:
        try:
            for number, data in enumerate(inputs):
                nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, data, len(data), f"module{number}")
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            raise RuntimeError(f"nvJitLink: {log.decode(errors='replace')}") from error
        size, get = (
            (nvjitlink.get_linked_ptx_size, nvjitlink.get_linked_ptx)
            if wanted == "ptx"
            else (nvjitlink.get_linked_cubin_size, nvjitlink.get_linked_cubin)
        )
        out = bytearray(size(handle))
        get(handle, out)
        log = bytearray(max(1, nvjitlink.get_info_log_size(handle)))
        nvjitlink.get_info_log(handle, log)
        return bytes(out), log.decode(errors="replace")
    finally:
        nvjitlink.destroy(handle)


def _entry(ptx: str) -> str:
    entries: list[str] = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(entries) != 1:
        raise RuntimeError(f"the linked PTX has {len(entries)} entries, not 1")
    return entries[0]


def _statistics(log: str) -> dict[str, int]:
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if used is None or frame is None:
        raise RuntimeError(f"ptxas reports no registers: {log}")
    shared = re.search(r"(\d+) bytes smem", log)
    return {
        "registers": int(used[1]),
        "stack": int(frame[1]),
        "spill_stores": int(frame[2]),
        "spill_loads": int(frame[3]),
        "static_shared": int(shared[1]) if shared else 0,
    }


# ---- the cache -------------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """AFDEP_SIM_CACHE, or ~/.cache/afdep_sim."""
    return Path(os.environ.get("AFDEP_SIM_CACHE") or Path.home() / ".cache" / "afdep_sim")


def _read(path: Path) -> Built | None:
    """A cached kernel; None where there is none or what is there cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            statistics = json.loads(archive.read("statistics.json"))
            return Built(cubin=archive.read("cubin"), ptx=archive.read("ptx").decode(), **statistics)
    except (OSError, zipfile.BadZipFile, KeyError, ValueError, TypeError):
        return None


def _write(path: Path, built: Built) -> None:
    """Whole or not at all, whoever else writes the same: a file of its own, then a rename."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError as error:
        raise Refusal(f"the kernel cache {path.parent} cannot be written ({error}); set AFDEP_SIM_CACHE") from error
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            rest = {f.name: getattr(built, f.name) for f in fields(built) if f.name not in ("cubin", "ptx")}
            archive.writestr("statistics.json", json.dumps(rest))
            archive.writestr("cubin", built.cubin)
            archive.writestr("ptx", built.ptx)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@cache
def _sources() -> bytes:
    """Hash over the files that the machine code comes from: the text, the phases, and this package."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*folder.parent.glob("*.py"), *folder.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@cache
def _toolchain() -> list[str]:
    from cuda.bindings import nvjitlink

    linker = ".".join(map(str, nvjitlink.version()))
    return [ARCH, f"nvjitlink {linker}", *(f"{name} {version(name)}" for name in VERSIONS)]


# ---- machine code ----------------------------------------------------------------------------------------------------


def machine_code(cubin: bytes) -> list[bytes]:
    """The contents of a cubin's code and constant sections (ELF64), sorted; names and debug data left out."""
    table = int.from_bytes(cubin[0x28:0x30], "little")
    size = int.from_bytes(cubin[0x3A:0x3C], "little")
    count = int.from_bytes(cubin[0x3C:0x3E], "little")
    names_at = int.from_bytes(cubin[0x3E:0x40], "little")

    def section(number: int) -> tuple[int, int, int]:
        at = table + number * size
        name = int.from_bytes(cubin[at : at + 4], "little")
        offset = int.from_bytes(cubin[at + 0x18 : at + 0x20], "little")
        length = int.from_bytes(cubin[at + 0x20 : at + 0x28], "little")
        return name, offset, length

    names = section(names_at)[1]
    code = []
    for number in range(count):
        name, offset, length = section(number)
        text = cubin[names + name : cubin.index(b"\0", names + name)]
        if text.startswith((b".text.", b".nv.constant")):
            code.append(cubin[offset : offset + length])
    return sorted(code)

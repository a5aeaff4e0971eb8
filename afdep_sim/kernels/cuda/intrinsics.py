"""PTX instructions as functions for Numba text: one generator, one line each, int64 at the surface.

Kinds of operands: l = 64 bits, r = 32 bits signed, u = 32 bits unsigned, f = float32. What is an integer in PTX is
int64 in the text: operands are truncated, results extended. Instructions that touch memory carry a memory clobber, so
that the compiler keeps their order; what other threads see is up to the order and scope in the instruction's name.
Vectors of 16 bytes stay opaque tuples between the intrinsics that make and use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_REGISTER = {"l": _I64, "r": _I32, "u": _I32, "f": _F32}
_SURFACE = {"l": types.int64, "r": types.int64, "u": types.int64, "f": types.float32}


def asm(text: str, results: str = "", arguments: str = "", *, pure: bool = False, convergent: bool = False) -> Any:
    """-> intrinsic for one instruction. Operands $0, $1, ... are the results, then the arguments, one kind each.

    pure: depends on its operands only and may be moved. convergent: warps meet in it, so it is never duplicated.
    """
    outputs = [f"=&{_letter(kind)}" if len(results) > 1 else f"={_letter(kind)}" for kind in results]
    constraints = ",".join([*outputs, *map(_letter, arguments), *([] if pure else ["~{memory}"])])
    registers = [_REGISTER[kind] for kind in results]
    returned: Any = {0: ir.VoidType(), 1: registers[0] if registers else None}.get(len(results))
    if returned is None:
        returned = ir.LiteralStructType(registers)
    function = ir.InlineAsm(
        ir.FunctionType(returned, [_REGISTER[kind] for kind in arguments]), text, constraints, side_effect=not pure
    )
    attributes = ("readnone",) if pure else ("convergent",) if convergent else ()
    surface = [_SURFACE[kind] for kind in results]
    result: Any = types.void if not results else surface[0] if len(results) == 1 else types.Tuple(surface)

    def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
        operands = [builder.trunc(v, _I32) if kind in "ru" else v for v, kind in zip(values, arguments, strict=True)]
        out = builder.call(function, operands, attrs=attributes)
        if not results:
            return context.get_dummy_value()
        parts = [out] if len(results) == 1 else [builder.extract_value(out, i) for i in range(len(results))]
        parts = [_extended(builder, part, kind) for part, kind in zip(parts, results, strict=True)]
        return parts[0] if len(parts) == 1 else context.make_tuple(builder, result, parts)

    return _of_arity(signature(result, *(_SURFACE[kind] for kind in arguments)), codegen)


def _letter(kind: str) -> str:
    return "r" if kind == "u" else kind


def _extended(builder: Any, value: Any, kind: str) -> Any:
    if kind == "r":
        return builder.sext(value, _I64)
    return builder.zext(value, _I64) if kind == "u" else value


def _of_arity(declared: Any, codegen: Callable[..., Any]) -> Any:
    """An intrinsic needs a Python signature of fixed length, one parameter per operand."""
    names = ", ".join(["typing_context", *(f"a{i}" for i in range(len(declared.args)))])
    space: dict[str, Any] = {"declared": declared, "codegen": codegen}
    exec(f"def instruction({names}):\n    return declared, codegen\n", space)
    return intrinsic(space["instruction"])


# ---- words: ld, st, red, atom (PTX "Memory consistency model": order and scope) --------------------------------------

load = asm("ld.global.s64 $0, [$1];", "l", "l")
load_i32 = asm("ld.global.s32 $0, [$1];", "r", "l")
load_relaxed_gpu = asm("ld.relaxed.gpu.global.s64 $0, [$1];", "l", "l")
load_acquire_gpu = asm("ld.acquire.gpu.global.s64 $0, [$1];", "l", "l")
load_acquire_sys = asm("ld.acquire.sys.global.s64 $0, [$1];", "l", "l")
load_volatile = asm("ld.volatile.global.s64 $0, [$1];", "l", "l")
store = asm("st.global.s64 [$0], $1;", "", "ll")
store_i32 = asm("st.global.s32 [$0], $1;", "", "lr")
store_relaxed_gpu = asm("st.relaxed.gpu.global.s64 [$0], $1;", "", "ll")
store_relaxed_sys = asm("st.relaxed.sys.global.s64 [$0], $1;", "", "ll")
store_i32_relaxed_sys = asm("st.relaxed.sys.global.s32 [$0], $1;", "", "lr")
add_relaxed_gpu = asm("red.relaxed.gpu.global.add.u64 [$0], $1;", "", "ll")
add_release_sys = asm("red.release.sys.global.add.u64 [$0], $1;", "", "ll")
min_relaxed_gpu = asm("red.relaxed.gpu.global.min.s64 [$0], $1;", "", "ll")
fetch_add_relaxed_gpu = asm("atom.relaxed.gpu.global.add.u64 $0, [$1], $2;", "l", "ll")
fetch_add_acq_rel_gpu = asm("atom.acq_rel.gpu.global.add.u64 $0, [$1], $2;", "l", "ll")
compare_swap_relaxed_sys = asm("atom.relaxed.sys.global.cas.b64 $0, [$1], $2, $3;", "l", "lll")
store_zeros_16 = asm("{ .reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [$0], {z, z, z, z}; }", "", "l")

# ---- shared memory (addresses are offsets of the shared window) ------------------------------------------------------

load_shared = asm("ld.shared.s32 $0, [$1];", "r", "u")
store_shared = asm("st.shared.s32 [$0], $1;", "", "ur")
add_shared = asm("red.shared.add.s32 [$0], $1;", "", "ur")
dynamic_shared_bytes = asm("mov.u32 $0, %dynamic_smem_size;", "u", pure=True)

# ---- mbarriers and bulk copies (PTX "cp.async.bulk", "mbarrier") -----------------------------------------------------

mbarrier_init = asm("mbarrier.init.shared::cta.b64 [$0], $1;", "", "uu")
mbarrier_init_fence = asm("fence.mbarrier_init.release.cluster;")
mbarrier_arrive_expect = asm("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;", "", "uu")
mbarrier_test = asm(
    "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
    "u",
    "uu",
)
bulk_load = asm("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", "", "uluu")
bulk_store = asm("cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "", "luu")
bulk_commit = asm("cp.async.bulk.commit_group;")
bulk_wait_all = asm("cp.async.bulk.wait_group 0;")
proxy_fence = asm("fence.proxy.async;")

# ---- launches, barriers, time ----------------------------------------------------------------------------------------

dependents_launch = asm("griddepcontrol.launch_dependents;")
dependencies_wait = asm("griddepcontrol.wait;")
group_barrier = asm("bar.sync 1, 128;", convergent=True)
group_any = asm(
    "{ .reg .pred p, q; setp.ne.u32 q, $1, 0; bar.red.or.pred p, 1, 128, q; selp.u32 $0, 1, 0, p; }",
    "u",
    "u",
    convergent=True,
)
global_timer = asm("mov.u64 $0, %globaltimer;", "l")
thread_exit = asm("exit;")

# ---- lanes (all 32 take part) ----------------------------------------------------------------------------------------

shuffle = asm("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "r", "ru", convergent=True)
shuffle_up = asm("shfl.sync.up.b32 $0, $1, $2, 0, 0xffffffff;", "r", "ru", convergent=True)
broadcast = asm(
    "{ .reg .b32 a, b; mov.b64 {a, b}, $1; shfl.sync.idx.b32 a, a, 0, 31, 0xffffffff; "
    "shfl.sync.idx.b32 b, b, 0, 31, 0xffffffff; mov.b64 $0, {a, b}; }",
    "l",
    "l",
    convergent=True,
)
ballot = asm(
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "u", "u", convergent=True
)
match = asm("match.any.sync.b32 $0, $1, 0xffffffff;", "u", "r", convergent=True)
maximum = asm("redux.sync.max.s32 $0, $1, 0xffffffff;", "r", "r", convergent=True)
population = asm("popc.b32 $0, $1;", "u", "u", pure=True)
highest_bit = asm("bfind.u32 $0, $1;", "r", "u", pure=True)
lowest_bit = asm("{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", "u", "u", pure=True)
without_lowest_bit = asm("{ .reg .b32 t; add.u32 t, $1, -1; and.b32 $0, $1, t; }", "u", "u", pure=True)
divide_u32 = asm("div.u32 $0, $1, $2;", "u", "uu", pure=True)
remainder_u32 = asm("rem.u32 $0, $1, $2;", "u", "uu", pure=True)
multiply_add = asm("mad.wide.u32 $0, $1, $2, $3;", "l", "uul", pure=True)


def _shared_base(_context: Any, builder: Any, _: Any, _values: Any) -> Any:
    name = "afdep_dynamic_shared"
    variable = builder.module.globals.get(name)
    if variable is None:
        variable = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=3)
        variable.linkage = "external"
        variable.align = 128
    return builder.zext(builder.ptrtoint(variable, _I32), _I64)


shared_base = _of_arity(signature(types.int64), _shared_base)
"""-> where the block's dynamic shared memory starts in the shared window, aligned to 128 bytes."""


# ---- rows: `count` vectors of 16 bytes per lane, 512 bytes apart, as opaque tuples -----------------------------------


class Vectors:
    """Intrinsics on `count` 16-byte vectors of BF16 pairs per lane.

    load(address, on) loads vectors, or -0.0 everywhere where `on` is 0, without a branch: -0.0 + x is x bit for bit
    for every x, so what is switched off leaves a sum alone. start(zero) makes FP32 accumulators of -0.0, or of 0.0
    where `zero` is not 0. add(sums, vectors) adds in FP32; add_pairs(a, b, on) adds BF16 pairs, or copies `a` where
    `on` is 0: an FP32 sum of two BF16 values rounded once is the same (24 >= 2 * 8 + 2 bits). store(shared, vectors)
    and store_rounded(shared, sums) write the stage; the latter rounds to nearest even.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.vectors = types.UniTuple(types.uint32, 4 * count)
        self.sums = types.UniTuple(types.float32, 8 * count)
        i64, void = types.int64, types.void
        self.load = _of_arity(signature(self.vectors, i64, i64), self._load)
        self.start = _of_arity(signature(self.sums, i64), self._start)
        self.add = _of_arity(signature(self.sums, self.sums, self.vectors), self._add)
        self.add_pairs = _of_arity(signature(self.vectors, self.vectors, self.vectors, i64), self._add_pairs)
        self.store = _of_arity(signature(void, i64, self.vectors), self._store)
        self.store_rounded = _of_arity(signature(void, i64, self.sums), self._store_rounded)

    def _load(self, context: Any, builder: Any, _: Any, values: Any) -> Any:
        address, on = values[0], builder.trunc(values[1], _I32)
        parts = []
        for vector in range(self.count):
            text = (
                "{ .reg .pred p; setp.ne.u32 p, $5, 0; "
                + "".join(f"mov.b32 ${i}, 0x80008000; " for i in range(4))
                + f"@p ld.global.L1::no_allocate.v4.b32 {{$0, $1, $2, $3}}, [$4 + {512 * vector}]; }}"
            )
            kind = ir.FunctionType(ir.LiteralStructType([_I32] * 4), [_I64, _I32])
            constraints = "=&r,=&r,=&r,=&r,l,r,~{memory}"
            out = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), [address, on])
            parts += [builder.extract_value(out, i) for i in range(4)]
        return context.make_tuple(builder, self.vectors, parts)

    def _start(self, context: Any, builder: Any, _: Any, values: Any) -> Any:
        positive = builder.icmp_unsigned("!=", values[0], _I64(0))
        first = builder.select(positive, _F32(0.0), _F32(-0.0))
        return context.make_tuple(builder, self.sums, [first] * 8 * self.count)

    def _add(self, context: Any, builder: Any, _: Any, values: Any) -> Any:
        sums = [builder.extract_value(values[0], i) for i in range(8 * self.count)]
        for i in range(4 * self.count):
            pair = builder.extract_value(values[1], i)
            low = builder.bitcast(builder.shl(pair, _I32(16)), _F32)
            high = builder.bitcast(builder.and_(pair, _I32(0xFFFF0000)), _F32)
            sums[2 * i] = builder.fadd(sums[2 * i], low)
            sums[2 * i + 1] = builder.fadd(sums[2 * i + 1], high)
        return context.make_tuple(builder, self.sums, sums)

    def _add_pairs(self, context: Any, builder: Any, _: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I32, _I32])
        add = ir.InlineAsm(kind, "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", side_effect=False)
        on = builder.icmp_unsigned("!=", values[2], _I64(0))
        parts = []
        for i in range(4 * self.count):
            a, b = builder.extract_value(values[0], i), builder.extract_value(values[1], i)
            parts.append(builder.select(on, builder.call(add, [a, b], attrs=("readnone",)), a))
        return context.make_tuple(builder, self.vectors, parts)

    def _store(self, context: Any, builder: Any, _: Any, values: Any) -> Any:
        self._store_parts(builder, values[0], [builder.extract_value(values[1], i) for i in range(4 * self.count)])
        return context.get_dummy_value()

    def _store_rounded(self, context: Any, builder: Any, _: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I32, [_F32, _F32])
        convert = ir.InlineAsm(kind, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", side_effect=False)
        sums = [builder.extract_value(values[1], i) for i in range(8 * self.count)]
        pairs = [
            builder.call(convert, [sums[2 * i + 1], sums[2 * i]], attrs=("readnone",)) for i in range(4 * self.count)
        ]
        self._store_parts(builder, values[0], pairs)
        return context.get_dummy_value()

    def _store_parts(self, builder: Any, address: Any, parts: list[Any]) -> None:
        shared = builder.trunc(address, _I32)
        kind = ir.FunctionType(ir.VoidType(), [_I32] * 5)
        for vector in range(self.count):
            text = f"st.shared.v4.b32 [$0 + {512 * vector}], {{$1, $2, $3, $4}};"
            function = ir.InlineAsm(kind, text, "r,r,r,r,r,~{memory}", side_effect=True)
            builder.call(function, [shared, *parts[4 * vector : 4 * vector + 4]])

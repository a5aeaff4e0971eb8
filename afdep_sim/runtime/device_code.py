"""Device code that is no part of the protocol: the experts' stand-in, a clock, and a test of cooperative launches.

CUDA C for NVRTC. Every argument is an int64, as the protocol's kernels have it.
"""

from __future__ import annotations

from typing import Any

ARCH = "sm_90"
THREADS = 256

EXPERTS = r"""
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// The nearest BF16, ties to even, as the upper half of a float's bits.
__device__ __forceinline__ u32 rounded(float v) {
    u32 b = __float_as_uint(v);
    if ((b & 0x7fffffffu) > 0x7f800000u) return (b & 0xffff0000u) | 0x00400000u;
    return (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
}

__device__ __forceinline__ float e4m3(u32 code) {
    u32 exponent = (code >> 3) & 15u, mantissa = code & 7u;
    float magnitude = exponent ? __uint_as_float(((exponent + 120u) << 23) | (mantissa << 20))
                               : __fmul_rn((float)mantissa, 0.001953125f);
    return code & 128u ? -magnitude : magnitude;
}

// Value `at` of received row `row`: BF16, or E4M3 with a packed UE8M0 scale per 128 values, pack by pack.
__device__ __forceinline__ float value(i64 x, i64 scales, i64 scale_rows, i64 row, i64 hidden, i64 at) {
    if (!scales) return __uint_as_float((u32)((const u16*)x)[row * hidden + at] << 16);
    i64 group = at >> 7;
    u32 pack = ((const u32*)scales)[(group >> 2) * scale_rows + row];
    u32 exponent = (pack >> (8 * (group & 3))) & 255u;
    return __fmul_rn(e4m3(((const u8*)x)[row * hidden + at]), __uint_as_float(exponent << 23));
}

// bf16(w * (x * s + b)), one rounding per operation.
__device__ __forceinline__ u32 stand_in(float x, float s, float b, float w) {
    return rounded(__fmul_rn(__fadd_rn(__fmul_rn(x, s), b), w));
}

// Received rows -> expert output: a row per slot, or (local_topk != 0) the lanes' rows summed in ascending order.
extern "C" __global__ void experts(
    i64 rows_at, i64 row_limit, i64 slot_limit, i64 psum_expert, i64 per_rank, i64 first_expert, i64 metadata, i64 topk,
    i64 x, i64 scales, i64 scale_rows, i64 weights, i64 local_topk, i64 y, i64 hidden, i64 scale_table, i64 bias_bits)
{
    i64 rows = *(const i64*)rows_at;
    if (rows > row_limit) return;
    float bias = __uint_as_float((u32)bias_bits);
    const float* table = (const float*)scale_table + first_expert;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        if (local_topk) {
            const int* local = (const int*)local_topk + row * topk;
            const float* weight = (const float*)weights + row * topk;
            for (i64 at = threadIdx.x; at < hidden; at += blockDim.x) {
                float in = value(x, scales, scale_rows, row, hidden, at), sum = 0.0f;
                int found = 0;
                for (i64 lane = 0; lane < topk; ++lane) {
                    if (local[lane] < 0 || local[lane] >= per_rank) continue;
                    float one = __uint_as_float(stand_in(in, table[local[lane]], bias, weight[lane]));
                    sum = found ? __fadd_rn(sum, one) : one;
                    found = 1;
                }
                ((u16*)y)[row * hidden + at] = (u16)(rounded(sum) >> 16);
            }
            continue;
        }
        for (i64 lane = 0; lane < topk; ++lane) {
            i64 slot = ((const int*)metadata)[row * (2 + topk) + 2 + lane];
            if (slot < 0 || slot >= slot_limit) continue;
            // The first expert whose rows end behind the slot.
            i64 low = 0, high = per_rank;
            while (low < high) {
                i64 middle = (low + high) / 2;
                if (((const i64*)psum_expert)[middle] > slot) high = middle;
                else low = middle + 1;
            }
            if (low >= per_rank) continue;
            float scale = table[low], weight = ((const float*)weights)[slot];
            for (i64 at = threadIdx.x; at < hidden; at += blockDim.x) {
                float in = value(x, scales, scale_rows, slot, hidden, at);
                ((u16*)y)[slot * hidden + at] = (u16)(stand_in(in, scale, bias, weight) >> 16);
            }
        }
    }
}

"""
CLOCKS = r"""
extern "C" __global__ void stamp(i64 out) {
    i64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *(i64*)out = now;
}

// Two launches of this kernel meet if both are resident: word `me` is raised, the other awaited for at most `limit` ns.
extern "C" __global__ void meet(i64 words, i64 me, i64 limit) {
    volatile i64* flag = (volatile i64*)words;
    if (threadIdx.x || blockIdx.x) return;
    i64 since, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(since));
    flag[me] = 1;
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!flag[1 - me] && now - since < limit);
    flag[2 + me] = flag[1 - me];
}
"""
SOURCE = EXPERTS + CLOCKS
NAMES = ("experts", "stamp", "meet")


def compile_device_code() -> Any:
    """-> the ObjectCode (cubin) of `SOURCE`; needs NVRTC, no GPU."""
    from afdep_sim.runtime.gpu import core

    options = core().ProgramOptions(std="c++17", arch=ARCH, fma=False)
    return core().Program(SOURCE, "c++", options).compile("cubin")

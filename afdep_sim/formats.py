"""Number formats as bit patterns: BF16, and E4M3 with one power-of-two scale per 128 values (packed UE8M0)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

GROUP = 128
"""Values that share a scale (upstream section 12)."""
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4
"""A group's largest magnitude counts as at least this, so that a group of zeros has a scale."""


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 [...] -> uint16 [...]: BF16 bit patterns, round to nearest even; finite inputs only."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 [...] BF16 bit patterns -> float32 [...]; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def scale_packs(hidden: int) -> int:
    """4-byte scale packs of a row of `hidden` values: four UE8M0 bytes each."""
    return -(-hidden // (4 * GROUP))


def quantise(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [T, H] -> (uint8 [T, H] E4M3 bit patterns, int32 [T, packs] packed UE8M0 scales).

    Byte g mod 4 of pack g // 4 scales group g by 2^(byte - 127), the smallest power of two that brings the group's
    largest magnitude to 448 or less. Values are clipped before the cast: E4M3 has no infinity to saturate to. H is a
    multiple of 128. Upstream section 12.
    """
    rows, hidden = values.shape
    groups = values.astype(np.float32, copy=False).reshape(rows, hidden // GROUP, GROUP)
    largest = np.maximum(np.abs(groups).max(axis=2, initial=0.0), np.float32(SMALLEST_AMAX))
    mantissa, exponent = np.frexp(largest / np.float32(E4M3_MAX))
    # frexp's mantissa lies in [0.5, 1): an exact power of two needs one less.
    exponent = exponent - (mantissa == 0.5)
    scaled = np.clip(np.ldexp(groups, -exponent[:, :, None]), -E4M3_MAX, E4M3_MAX)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(rows, hidden)
    bytes_ = np.zeros((rows, 4 * scale_packs(hidden)), np.uint8)
    bytes_[:, : hidden // GROUP] = exponent + 127
    return codes, bytes_.view(np.int32)


def dequantise(codes: np.ndarray, packs: np.ndarray) -> np.ndarray:
    """(uint8 [n, H] E4M3, int32 [n, packs] UE8M0) -> float32 [n, H]; exact."""
    rows, hidden = codes.shape
    exponent = np.ascontiguousarray(packs).view(np.uint8)[:, : hidden // GROUP].astype(np.int32) - 127
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(rows, hidden // GROUP, GROUP)
    result: np.ndarray = np.ldexp(values, exponent[:, :, None]).reshape(rows, hidden)
    return result

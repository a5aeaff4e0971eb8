"""Routes from a file: the top-k indices (and weights) that a router produced, layer by layer.

An .npz file with `topk`, integers [layers, tokens, k] (or [tokens, k]), -1 for no route, and optionally `weights`,
floats of the same shape. One such file ships with the package (`EXAMPLE`).
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np

from afdep_sim.errors import Refusal


@dataclass(frozen=True)
class RouteFile:
    """topk: int64 [layers, tokens, k]; weights: float32, the same shape."""

    topk: np.ndarray
    weights: np.ndarray

    def take(self, layer: int, place: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [T, k], float32 [T, k]): the `place`-th run of T rows of layer `layer` mod layers, round the end."""
        layers, count, _ = self.topk.shape
        rows = (place * tokens + np.arange(tokens)) % count
        chosen = layer % layers
        return np.ascontiguousarray(self.topk[chosen, rows]), np.ascontiguousarray(self.weights[chosen, rows])


def check_routes(topk: np.ndarray, experts: int, name: str = "routes") -> None:
    """Refuse routes that name no expert: int [..., k] outside [-1, experts), or an expert twice in one row."""
    wrong = (topk < -1) | (topk >= experts)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise Refusal(f"{name} has expert {int(topk[at])} at {list(at)}, outside 0 to {experts - 1} (-1 is no route)")
    ordered = np.sort(topk, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        at = tuple(int(i) for i in np.argwhere(twice)[0])
        raise Refusal(f"{name} has expert {int(ordered[at])} twice in row {list(at[:-1])}, more than once")


@lru_cache(maxsize=8)
def read_routes(path: str, topk: int, experts: int) -> RouteFile:
    """Read and check a file of routes. Raises `Refusal` for a missing or malformed one, or routes that do not fit."""
    file = Path(path)
    if not file.is_file():
        raise Refusal(f"routing file {path!r} does not exist")
    try:
        arrays = np.load(file, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise ValueError("it is one array without a name")
        with arrays:
            # A member that is no array comes as bytes; its dtype is refused below.
            found = {name: np.asarray(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise Refusal(f"routing file {path!r} is not an .npz file of plain arrays ({error})") from None
    if "topk" not in found:
        raise Refusal(f"routing file {path!r} has no array named topk (it has {', '.join(sorted(found)) or 'none'})")
    routes = found["topk"]
    if routes.dtype.kind not in "iu":
        raise Refusal(f"routing file {path!r} has topk of dtype {routes.dtype}, not integers")
    if routes.ndim == 2:
        routes = routes[None]
    if routes.ndim != 3 or routes.shape[2] != topk or 0 in routes.shape:
        raise Refusal(f"routing file {path!r} has topk of shape {found['topk'].shape}, not [layers, tokens, {topk}]")
    if routes.dtype == np.uint64 and int(routes.max()) >= 1 << 63:
        raise Refusal(f"routing file {path!r} has expert {int(routes.max())}, outside 0 to {experts - 1}")
    routes = routes.astype(np.int64)
    check_routes(routes, experts, f"routing file {path!r}")
    if "weights" not in found:
        weights = np.full(routes.shape, np.float32(1 / topk))
    else:
        weights = found["weights"]
        if weights.dtype.kind != "f":
            raise Refusal(f"routing file {path!r} has weights of dtype {weights.dtype}, not floats")
        if weights.shape != found["topk"].shape:
            raise Refusal(f"routing file {path!r} has weights of shape {weights.shape}, not {found['topk'].shape}")
        with np.errstate(over="ignore"):
            weights = weights.reshape(routes.shape).astype(np.float32)
        if not np.isfinite(weights).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(weights))[0])
            value = found["weights"].reshape(routes.shape)[at]
            raise Refusal(f"routing file {path!r} has weight {value} at {list(at)}, not finite in float32")
    return RouteFile(routes, weights)


@lru_cache(maxsize=64)
def routing_name(routing: str) -> str:
    """What a record calls a routing: its word, or a file's name and a digest of its bytes, wherever the file lies."""
    if not routing.endswith(".npz"):
        return routing
    return f"{Path(routing).name}@{hashlib.sha256(Path(routing).read_bytes()).hexdigest()[:8]}"


def example() -> str:
    """The path of the file of routes that ships with the package."""
    return str(resources.files("afdep_sim") / "data" / "routes.npz")


def imbalance(topk: np.ndarray, experts: int, groups: int = 1) -> float:
    """Load imbalance of int [..., k] routes: the busiest of `groups` equal shares of experts, over the mean. 1 is even.

    groups=experts asks it of experts, groups=FFN ranks of ranks. Raises `ValueError` for shares that are not equal, and
    for routes outside the experts.
    """
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not make {groups} equal shares")
    chosen = topk[topk >= 0].astype(np.int64)
    if len(chosen) and chosen.max() >= experts:
        raise ValueError(f"expert {chosen.max()} is outside 0 to {experts - 1}")
    counts = np.bincount(chosen // (experts // groups), minlength=groups)
    return float(counts.max() / counts.mean()) if len(chosen) else 1.0

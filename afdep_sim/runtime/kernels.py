"""A plan's cubins, built side by side before a GPU is touched."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from afdep_sim.kernels.cuda.compile import Built, Variant, build, cache_directory
from afdep_sim.plan import Plan


def wanted(plans: Iterable[Plan], trace: bool = False) -> list[Variant]:
    """Every kernel that some plan launches, each once, in the order of plans."""
    launches = (launch for plan in plans for e in plan.exchanges for stream in e.streams for launch in stream)
    return list(dict.fromkeys(Variant.of(launch, trace) for launch in launches))


def prepare_kernels(plans: Iterable[Plan], trace: bool = False, workers: int = 0) -> dict[Variant, Built]:
    """Build what the cache lacks, in `workers` processes (one per core where 0), and read all of it.

    Never in this process: Numba would open the GPU that it finds.
    """
    variants = wanted(plans, trace)
    missing = [variant for variant in variants if not (cache_directory() / f"{variant.key}.zip").exists()]
    workers = min(workers or os.cpu_count() or 1, len(missing))
    if missing:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_hide_gpus) as pool:
            list(pool.map(_build, missing))
    return {variant: build(variant) for variant in variants}


def _hide_gpus() -> None:
    """A build needs no GPU, and a process without one makes no context on it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _build(variant: Variant) -> None:
    """Nothing is sent back: the cache has it."""
    build(variant)

"""One GPU through cuda.core and the driver: memory, streams, events, kernels, launches. Imported packages are lazy."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

ENVIRONMENT = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Read when CUDA starts. A kernel that is loaded while another spins on it would wait for that one: a deadlock. And
streams that share a hardware queue wait for each other."""
EXTERNAL = 1
"""CU_EVENT_RECORD_EXTERNAL: while capturing, a node of the graph instead of a dependency of the capture."""
FILLS = 64
"""Bytes of the buffer on which asynchronous copies and fills are tried once before anything spins."""


def prepare_environment() -> None:
    """Set what CUDA reads when it starts; call it before anything touches CUDA."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@cache
def core() -> Any:
    """The module that has Device, LaunchConfig and launch, where this version of cuda.core keeps them."""
    import cuda.core as module

    if hasattr(module, "Device"):
        return module
    import cuda.core.experimental as experimental

    return experimental


class CudaError(RuntimeError):
    """A driver call failed. After most of these the process's CUDA context is lost."""


class Gpu:
    """A device whose primary context is current. Addresses are plain ints; sizes are bytes."""

    def __init__(self, number: int = 0) -> None:
        prepare_environment()
        from cuda.bindings import driver

        self.driver = driver
        self.number = number
        self.device = core().Device(number)
        self.device.set_current()
        self.name = str(self.device.name)
        self.sms = int(self.device.properties.multiprocessor_count)
        self._configurations: dict[tuple[Any, ...], Any] = {}
        self._try_transfers()

    def call(self, result: tuple[Any, ...]) -> Any:
        """The value of a driver call's result; raises `CudaError` for a failed one."""
        if int(result[0]):
            raise CudaError(f"{getattr(result[0], 'name', result[0])}")
        return result[1] if len(result) == 2 else result[1:]

    def synchronize(self) -> None:
        self.call(self.driver.cuCtxSynchronize())

    # ---- memory ------------------------------------------------------------------------------------------------------

    @contextmanager
    def pool(self) -> Iterator[Pool]:
        """Memory that is freed at the end, when nothing runs on it any more."""
        pool = Pool(self)
        try:
            yield pool
        finally:
            pool.close()

    def upload(self, address: int, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        if values.nbytes:
            self.call(self.driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes))

    def download(self, address: int, size: int) -> np.ndarray:
        """-> uint8 [size]."""
        data = np.empty(size, np.uint8)
        if size:
            self.call(self.driver.cuMemcpyDtoH(data.ctypes.data, address, size))
        return data

    def zero(self, address: int, size: int) -> None:
        if size:
            self.call(self.driver.cuMemsetD8(address, 0, size))

    def copy(self, stream: Any, destination: int, source: int, size: int) -> None:
        """A copy inside the device, in stream order."""
        if size:
            self.call(self.driver.cuMemcpyDtoDAsync(destination, source, size, self.raw(stream)))

    def fill(self, stream: Any, address: int, value: int, count: int, row_bytes: int, stride: int) -> None:
        """`count` rows of 16-bit `value`, in stream order."""
        if count and stride == row_bytes:
            self.call(self.driver.cuMemsetD16Async(address, value, count * row_bytes // 2, self.raw(stream)))
        elif count:
            raw = self.raw(stream)
            self.call(self.driver.cuMemsetD2D16Async(address, stride, value, row_bytes // 2, count, raw))

    def _try_transfers(self) -> None:
        """Each kind of copy and fill once: the driver may load a kernel of its own for the first of a kind."""
        stream = self.stream()
        with self.pool() as pool:
            at = pool.allocate(4 * FILLS)
            self.copy(stream, at, at + 2 * FILLS, FILLS)
            self.fill(stream, at, 0, 2, 8, 8)
            self.fill(stream, at, 0, 2, 8, 16)
            self.synchronize()

    # ---- streams, events, graphs -------------------------------------------------------------------------------------

    def stream(self) -> Any:
        return self.device.create_stream()

    def raw(self, stream: Any) -> Any:
        """The driver's handle of a stream, or of a graph that is being built."""
        return self.driver.CUstream(int(stream.__cuda_stream__()[1]))

    def event(self) -> Any:
        return self.call(self.driver.cuEventCreate(0))

    def record(self, event: Any, stream: Any, external: bool = False) -> None:
        flags = EXTERNAL if external else 0
        self.call(self.driver.cuEventRecordWithFlags(event, self.raw(stream), flags))

    def elapsed_us(self, first: Any, last: Any) -> float:
        return 1e3 * float(self.call(self.driver.cuEventElapsedTime(first, last)))

    def graph(self) -> Any:
        """A graph that is being built."""
        return self.device.create_graph_builder().begin_building()

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def load(self, code: Any, entry: str, shared_bytes: int = 0) -> Any:
        """A kernel of a cubin, on the device now, that may use `shared_bytes` of dynamic shared memory."""
        objects = core().ObjectCode.from_cubin(code) if isinstance(code, bytes) else code
        kernel = objects.get_kernel(entry)
        handle = self._handle(kernel)
        self.call(self.driver.cuKernelGetFunction(handle))
        if shared_bytes:
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call(self.driver.cuKernelSetAttribute(attribute, shared_bytes, handle, self.number))
        return kernel

    def blocks_per_sm(self, kernel: Any, threads: int, shared_bytes: int) -> int:
        """What the driver says fits one SM of this kernel alone."""
        function = self.call(self.driver.cuKernelGetFunction(self._handle(kernel)))
        return int(self.call(self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared_bytes)))

    def launch(
        self,
        stream: Any,
        kernel: Any,
        grid: int,
        threads: int,
        arguments: Sequence[int],
        shared_bytes: int = 0,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        """Launch on a stream or into a graph; every argument is an int64."""
        key = (grid, threads, shared_bytes, cooperative, programmatic)
        if key not in self._configurations:
            self._configurations[key] = core().LaunchConfig(
                grid=grid,
                block=threads,
                shmem_size=shared_bytes,
                is_cooperative=cooperative,
                programmatic_stream_serialization=programmatic,
            )
        core().launch(stream, self._configurations[key], kernel, *[ctypes.c_int64(value) for value in arguments])

    @staticmethod
    def _handle(kernel: Any) -> Any:
        return kernel._handle if hasattr(kernel, "_handle") else kernel.handle


class Pool:
    """Device memory that is freed together."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.addresses: list[int] = []

    def allocate(self, size: int) -> int:
        """The address of `size` bytes of zeros, aligned to 256."""
        address = int(self.gpu.call(self.gpu.driver.cuMemAlloc(max(size, 256))))
        self.addresses.append(address)
        self.gpu.zero(address, max(size, 256))
        return address

    def store(self, values: np.ndarray) -> int:
        """The address of a copy of `values`."""
        address = self.allocate(values.nbytes)
        self.gpu.upload(address, values)
        return address

    def close(self) -> None:
        for address in self.addresses:
            # A lost context has lost its memory too; what lost it is being reported.
            self.gpu.driver.cuMemFree(address)
        self.addresses = []

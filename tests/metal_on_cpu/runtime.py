"""Loads compiled kernels and runs them on the emulated GPU."""

import ctypes
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from .compiler import READELF, SYMBOLIZER, MetalError, run, runtime_library
from .counts import Counts, read_blocks, total

ORDERS = ("forward", "reverse", "random")
POISONS = ("zero", "ones", "random")
MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32768


@dataclass(frozen=True)
class Schedule:
    """In which order threads and threadgroups run.

    ``preempt`` switches threads at one in that many memory accesses (0: only where they wait),
    ``reduce_order`` varies the order of sums inside a simdgroup, ``poison`` is what threadgroup
    memory holds at first, ``skew`` shifts every buffer by that many elements.
    """

    order: str = "random"
    seed: int = 1
    preempt: int = 0
    reduce_order: int = 0
    poison: str = "ones"
    skew: int = 0


class _Config(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("order", ctypes.c_uint32),
        ("preempt", ctypes.c_uint32),
        ("reduce_order", ctypes.c_uint32),
        ("poison", ctypes.c_uint32),
        ("max_reports", ctypes.c_uint32),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 600),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )


@cache
def library() -> ctypes.CDLL:
    """The emulated GPU; its symbols are visible to the kernels that are loaded later."""
    lib = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    u64, p = ctypes.c_uint64, ctypes.c_void_p
    lib.msl_alloc.argtypes, lib.msl_alloc.restype = (u64, u64), p
    lib.msl_free.argtypes = (p, u64, u64)
    lib.msl_region.argtypes = (p, u64, ctypes.c_char_p, *[ctypes.c_int] * 4)
    lib.msl_unwritten.argtypes = (ctypes.c_char_p, p)
    lib.msl_dispatch.argtypes = (p, p, p, p, u64, u64)
    lib.msl_report.restype = ctypes.POINTER(_Report)
    lib.msl_block_count.argtypes, lib.msl_block_count.restype = (ctypes.c_uint32,), u64
    lib.msl_counted.argtypes = (p,)
    return lib


@dataclass(frozen=True)
class Variable:
    """A threadgroup variable of a loaded kernel."""

    name: str
    address: int
    size: int


@dataclass(frozen=True)
class Loaded:
    """A kernel in memory: its entry, its address range and its threadgroup variables."""

    path: Path
    handle: ctypes.CDLL
    base: int
    code_size: int
    variables: tuple[Variable, ...]


@cache
def load(path: Path) -> Loaded:
    """Load a compiled kernel.

    Errors: :class:`MetalError` if it has more threadgroup memory than Apple GPUs, or a variable
    at program scope.
    """
    library()
    handle = ctypes.CDLL(str(path))
    listing = run(READELF, "-sSlW", path)[1]
    entry = re.search(r": ([0-9a-f]+) .* msl_entry$", listing, re.M)[1]
    base = ctypes.cast(handle.msl_entry, ctypes.c_void_p).value - int(entry, 16)
    variables, findings = {}, []
    for address, size, section, name in re.findall(
        r": ([0-9a-f]+)\s+(\d+) OBJECT .* (\d+) (\S+)$", listing, re.M
    ):
        kind = re.search(rf"\[ *{section}\] (\S+)", listing)[1]
        if kind == "msltg" and "__msl_pad" not in name:
            start = base + int(address, 16)
            variables[start] = Variable(_short_name(name), start, int(size))
        elif kind in (".data", ".bss"):
            findings.append(("compile", f"variable '{name}' must be in the constant address space"))
    total = sum(v.size for v in variables.values())
    if total > MAX_THREADGROUP_BYTES:
        findings.append(("limit", f"{total} bytes of threadgroup memory; there are 32768"))
    if findings:
        raise MetalError(findings)
    # Code and constants lie before the first writable segment.
    writable = re.findall(r"LOAD\s+\S+ 0x([0-9a-f]+) .* RW ", listing)
    code_size = min(int(address, 16) for address in writable)
    return Loaded(path, handle, base, code_size, tuple(variables.values()))


def _short_name(mangled: str) -> str:
    """The name of a variable inside a function: ``_ZZ...E4tile_0`` is ``tile``."""
    for match in re.finditer(r"(?<=E)(\d+)(?=([A-Za-z_]\w*)$)", mangled):
        length = int(match[1])
        if re.fullmatch(r"(_\d+_?)?", match[2][length:]):
            return match[2][:length]
    return mangled


class Dispatch:
    """One launch: buffers with guard pages, then the run, then what was found."""

    def __init__(self, loaded: Loaded, schedule: Schedule, shadowed: bool):
        self._loaded, self._schedule, self._shadowed = loaded, schedule, shadowed
        self._gpu = library()
        self._buffers: list[tuple[int, int, int]] = []
        config = _Config(
            schedule.seed,
            ORDERS.index(schedule.order),
            schedule.preempt,
            schedule.reduce_order,
            POISONS.index(schedule.poison),
            20,
        )
        self._gpu.msl_reset(ctypes.byref(config))
        self._gpu.msl_count_begin()
        for v in loaded.variables:
            self._gpu.msl_region(v.address, v.size, v.name.encode(), 1, 0, int(shadowed), 0)

    def buffer(self, name: str, data: np.ndarray, writable: bool, initialised: bool = True) -> None:
        """Add the next buffer, filled with ``data``."""
        skew = self._schedule.skew * data.itemsize % 16 if data.ndim else 0
        address = self._gpu.msl_alloc(data.nbytes, skew)
        self._buffers.append((address, data.nbytes, skew))
        data = np.ascontiguousarray(data)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)
        shadow = int(writable and self._shadowed)
        self._gpu.msl_region(
            address, data.nbytes, name.encode(), int(writable), 1, shadow, int(initialised)
        )

    def run(self, grid: tuple[int, ...], threadgroup: tuple[int, ...]) -> list[tuple[str, str]]:
        """Run all threadgroups; the findings."""
        addresses = (ctypes.c_void_p * len(self._buffers))(*(a for a, _, _ in self._buffers))
        low = self._loaded.base
        self._gpu.msl_dispatch(
            ctypes.cast(self._loaded.handle.msl_entry, ctypes.c_void_p),
            addresses,
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*threadgroup),
            low,
            low + self._loaded.code_size,
        )
        count = self._gpu.msl_report_count()
        return self._describe([self._gpu.msl_report(i).contents for i in range(count)])

    def read(self, index: int, like: np.ndarray) -> np.ndarray:
        """The contents of the buffer added as number ``index``."""
        out = np.empty_like(like, order="C")
        ctypes.memmove(out.ctypes.data, self._buffers[index][0], out.nbytes)
        return out

    def unwritten(self, name: str, like: np.ndarray) -> np.ndarray:
        """Which elements of an output no thread wrote."""
        mask = np.zeros(max(like.nbytes, 1), np.uint8)
        self._gpu.msl_unwritten(name.encode(), mask.ctypes.data)
        return mask[: like.nbytes].reshape(*like.shape, like.itemsize).any(-1)

    def statistics(self) -> dict[str, int]:
        """How many checked accesses, thread switches, simdgroup operations and barriers ran."""
        counts = (ctypes.c_uint64 * 4)()
        self._gpu.msl_statistics(counts)
        return dict(zip(("accesses", "switches", "simd_ops", "barriers"), counts, strict=True))

    def counts(self, grid: tuple[int, ...], threadgroup: tuple[int, ...]) -> Counts:
        """What a kernel that was compiled to count has executed."""
        blocks, memory = read_blocks(self._loaded.path), (ctypes.c_uint64 * 7)()
        self._gpu.msl_counted(memory)
        executed = [self._gpu.msl_block_count(i) for i in range(len(blocks))]
        groups = math.prod(-(-n // min(n, size)) for n, size in zip(grid, threadgroup, strict=True))
        return replace(total(blocks, executed, list(memory)), threadgroups=groups)

    def close(self) -> None:
        """Free the buffers."""
        for address, size, skew in self._buffers:
            self._gpu.msl_free(address, size, skew)

    def _describe(self, reports: list[_Report]) -> list[tuple[str, str]]:
        low, high = self._loaded.base, self._loaded.base + self._loaded.code_size
        inside = {pc for r in reports for pc in (r.pc, r.other_pc) if low <= pc < high}
        places = self._places(sorted(pc - low for pc in inside))
        findings = []
        for report in reports:
            at = [places[pc - low] for pc in (report.pc, report.other_pc) if pc in inside]
            text = report.message.decode() + (f" at {' and '.join(at)}" if at else "")
            text += f" ({report.count} times)" * (report.count > 1)
            findings.append((report.kind.decode(), text))
        return findings

    def _places(self, offsets: list[int]) -> dict[int, str]:
        """file:line:column in the kernel's own text, behind whatever was inlined there."""
        if not offsets:
            return {}
        command = (SYMBOLIZER, f"--obj={self._loaded.path}", "--functions=none", "--inlines")
        blocks = run(*command, *map(hex, offsets))[1].strip().split("\n\n")
        places = {}
        for offset, block in zip(offsets, blocks, strict=True):
            lines = [line.split("/")[-1] for line in block.split()]
            own = [line for line in lines if ".metal:" in line or line.startswith("generated")]
            places[offset] = (own or lines)[0]
        return places

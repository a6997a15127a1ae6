"""Metal text -> a shared library, through clang 19; everything is cached by content.

All checkouts and environments of a user share the cache, so nothing in it may depend on a path.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx

from .counts import instrument
from .lint import POISONED, lint
from .rewrite import rewrite
from .source import Generated, KernelText

CXX = "clang++-19"
SYMBOLIZER = "llvm-symbolizer-19"
READELF = "readelf"
HERE = Path(__file__).resolve().parent
KERNELS = Path("mlx/backend/metal/kernels")
CACHE = Path(tempfile.gettempdir()) / f"metal_on_cpu-{os.getuid()}"

_LANGUAGE = [
    "-std=c++14",
    "-nostdinc",
    "-nostdinc++",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-lax-vector-conversions",
    # Half and bfloat are rounded after every operation, as on the GPU.
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-fno-threadsafe-statics",
    "-fno-omit-frame-pointer",
    *("-Xclang", "-fconvergent-functions"),
    "-fPIC",
    "-ferror-limit=5",
    "-Wno-unknown-attributes",
    "-Wno-c++17-extensions",
    "-Wno-c++20-extensions",
    "-Wno-duplicate-decl-specifier",
]
_STRICT = [
    "-Wall",
    "-Wimplicit-float-conversion",
    "-Werror=vla",
    "-Werror=return-type",
    "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized",
    "-Wno-unused-variable",
    "-Wno-unused-function",
    "-Wno-unused-but-set-variable",
    "-Wno-sign-compare",
    "-Wno-switch",
    "-Wno-parentheses",
]
# `check` routes every access through runtime/hooks.cpp; `fast` relies on guard pages and poison.
MODES = {
    "check": [
        *(
            "-O1",
            "-gline-tables-only",
            "-fsanitize=thread",
            "-mllvm",
            "-tsan-instrument-func-entry-exit=0",
        ),
        *("-mllvm", "-tsan-instrument-read-before-write=1", "-fno-sanitize-link-runtime"),
        "-fsanitize=array-bounds,shift,integer-divide-by-zero,signed-integer-overflow,"
        "float-cast-overflow,bool",
    ],
    "fast": ["-O1", "-gline-tables-only"],
    # As Apple's compiler leaves loops; see counts.py.
    "count": [
        *("-O2", "-gline-tables-only", "-fno-vectorize", "-fno-slp-vectorize"),
        *("-mllvm", "-unroll-threshold=20000", "-mllvm", "-disable-vector-combine"),
        "-ftrivial-auto-var-init=uninitialized",
        # A product and a sum in one expression are one instruction.
        "-ffp-contract=on",
    ],
}
_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "t->dispatch_simdgroups * 8",
    "dispatch_simdgroups_per_threadgroup": "t->dispatch_simdgroups",
    "dispatch_threads_per_threadgroup": "t->dispatch_threads_per_threadgroup",
    "grid_origin": "zero",
    "grid_size": "t->threads_per_grid",
    "quadgroup_index_in_threadgroup": "t->index_in_threadgroup / 4",
    "quadgroups_per_threadgroup": "t->simdgroups * 8",
    "simdgroup_index_in_threadgroup": "t->simdgroup",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "thread_execution_width": "32",
    "thread_index_in_quadgroup": "t->index_in_threadgroup % 4",
    "thread_index_in_simdgroup": "t->lane",
    "thread_index_in_threadgroup": "t->index_in_threadgroup",
    "thread_position_in_grid": "t->position_in_grid",
    "thread_position_in_threadgroup": "t->position_in_threadgroup",
    "threadgroup_position_in_grid": "t->threadgroup_position",
    "threadgroups_per_grid": "t->threadgroups_per_grid",
    "threads_per_grid": "t->threads_per_grid",
    "threads_per_simdgroup": "32",
    "threads_per_threadgroup": "t->threads_per_threadgroup",
}


class MetalError(AssertionError):
    """What was found wrong with a kernel; ``findings`` holds (kind, text) pairs."""

    def __init__(self, findings: list[tuple[str, str]]):
        self.findings = findings
        super().__init__("\n".join(f"[{kind}] {text}" for kind, text in findings))

    @property
    def kinds(self) -> set[str]:
        """The kinds of finding, without their texts."""
        return {kind for kind, _ in self.findings}


def missing_tools() -> list[str]:
    """The programs that the bench needs and this machine has not."""
    return [tool for tool in (CXX, SYMBOLIZER, READELF) if not shutil.which(tool)]


def run(*command: str | Path) -> tuple[int, str]:
    """Run a program; its exit status and all it printed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    return done.returncode, done.stderr + done.stdout


@cache
def _compiler() -> str:
    """The compiler's version."""
    return run(CXX, "--version")[1]


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr((_compiler(), *parts)).encode()).hexdigest()[:20]


def _partial(target: Path) -> Path:
    """Where a file is written before it is renamed, so that no other process reads half of it."""
    target.parent.mkdir(exist_ok=True, parents=True)
    return target.with_name(f"{target.name}.{os.getpid()}")


def _write(target: Path, content: bytes) -> Path:
    partial = _partial(target)
    partial.write_bytes(content)
    return partial.rename(target)


def _build(target: Path, *command: str | Path) -> str:
    """Run a compile that writes ``target``; what the compiler said."""
    partial = _partial(target)
    status, said = run(CXX, *command, "-o", partial)
    if status == 0:
        partial.rename(target)
    return said


@cache
def runtime_library() -> Path:
    """The emulated GPU, built from ``runtime/``."""
    files = sorted((HERE / "runtime").iterdir())
    flags = ["-std=c++17", "-O2", "-g", "-fPIC", "-fno-omit-frame-pointer"]
    # Kernels find libm through this library: linking them against nothing saves time.
    flags += ["-shared", "-Wl,--no-as-needed", "-lm"]
    target = CACHE / f"runtime-{_digest(flags, *(f.read_bytes() for f in files))}.so"
    if not target.exists():
        said = _build(target, *flags, *(f for f in files if f.suffix == ".cpp"))
        if not target.exists():
            raise RuntimeError(f"the runtime of the bench does not build:\n{said}")
    return target


def mlx_include() -> Path:
    """The headers of the installed MLX."""
    return Path(mx.__file__).parent / "include"


@cache
def _headers() -> Path:
    """A folder with the shim and MLX's headers, whose name tells its content.

    A precompiled header remembers where each of its files lay: a second copy of one elsewhere
    would be another file, and be included once more.
    """
    wheel, shim = mlx_include(), HERE / "shim"
    files = {f.relative_to(wheel): f.read_bytes() for f in sorted((wheel / KERNELS).rglob("*.h"))}
    # Array parameters in an address space parse in Metal only.
    files[KERNELS / "utils.h"] = re.sub(
        rb"(constant const int64_t)( strides)\[\d\]", rb"\1*\2", files[KERNELS / "utils.h"]
    )
    for file in sorted(shim.rglob("*")):
        if file.is_file():
            files[file.relative_to(shim)] = file.read_bytes()
    folder = CACHE / f"headers-{_digest(*((str(name), text) for name, text in files.items()))}"
    for name, text in files.items():
        # Also what a cleaner of temporary files took away.
        if not (folder / name).exists():
            _write(folder / name, text)
    return folder


@cache
def _preamble(mode: str) -> tuple[Path, str, str]:
    """Precompiled MLX preamble, include flag, and a digest of all that it is made of."""
    folder = _headers()
    include = f"-isystem{folder}"
    digest = _digest(folder.name, _LANGUAGE, MODES[mode])
    header = CACHE / f"{digest}.pch"
    if not header.exists():
        flags = [*_LANGUAGE, include, *MODES[mode], "-Xclang", "-fno-pch-timestamp"]
        said = _build(header, *flags, "-x", "c++-header", folder / KERNELS / "utils.h")
        if not header.exists():
            raise RuntimeError(f"MLX's preamble does not compile:\n{said}")
    return header, include, digest


def _launcher(generated: Generated) -> str:
    """A plain function that takes the buffers and one thread's place, and calls the kernel."""
    arguments = []
    for p in generated.parameters:
        if p.buffer is not None:
            arguments.append(f"{'*' if p.by_reference else ''}({p.type}*)buffers[{p.buffer}]")
        elif p.type == "uint3":
            v = _ATTRIBUTES[p.name]
            arguments.append(f"__msl_make_uint3({v}[0], {v}[1], {v}[2])")
        else:
            arguments.append(_ATTRIBUTES[p.name])
    machine = (HERE / "runtime" / "machine.h").read_text()
    struct = machine[machine.index("struct MslThread") :]
    return (
        f"{struct[: struct.index('};') + 2]}\n"
        'extern "C" __attribute__((no_sanitize("thread"), visibility("default")))\n'
        "void msl_entry(void** buffers, const MslThread* t) {\n"
        "const unsigned zero[3] = {0, 0, 0}; (void)zero;\n"
        f"{generated.call}({', '.join(arguments)}); }}\n"
    )


_DIAGNOSTIC = re.compile(r"(?:.*/)?(.*?): (?:fatal )?(error|warning): (.*)")


def _is_error(level: str, text: str) -> bool:
    """Float to half is implicit in Metal, float to bfloat is not."""
    to_bfloat = re.search(r"to '(bfloat\w*'|[^']*' \(aka '__bf16'\))", text)
    return level == "error" or ("float-conversion" in text and bool(to_bfloat))


def compile_kernel(kernel: KernelText, generated: Generated, mode: str, lint_header: bool) -> Path:
    """Compile one specialisation to a shared library.

    Errors: :class:`MetalError` with what Apple's compiler would refuse, as far as clang and the
    lint can tell.
    """
    body = f'\n#line 1 "{kernel.name}.metal"\n{kernel.source}\n#line 9000 "generated"\n'
    text = rewrite(generated.text.replace(kernel.source, body, 1), count_loops=mode == "check")
    text = f"#pragma GCC poison {POISONED}\n{text}\n{_launcher(generated)}"
    findings = [("lint", f"{kernel.name}.metal: {what}") for what in lint(kernel.source)]
    if lint_header:
        findings += [("lint", f"header: {what}") for what in lint(kernel.header, is_header=True)]
    header, include, digest = _preamble(mode)
    counting = (HERE / "counts.py").read_text() if mode == "count" else ""
    target = CACHE / f"{_digest(text, digest, _STRICT, counting)}.so"
    if findings or not target.exists():
        path = _write(target.with_suffix(".cpp"), text.encode())
        flags = [*_LANGUAGE, *_STRICT, include, *MODES[mode], "-include-pch", header]
        said = _build_counted(target, flags, path) if mode == "count" else ""
        if mode != "count":
            said = _build(target, *flags, "-shared", "-nostdlib", path)
        for line in said.splitlines():
            if (match := _DIAGNOSTIC.match(line)) and _is_error(match[2], match[3]):
                findings.append(("compile", f"{match[1]}: {match[3]}"))
        if findings:
            target.unlink(missing_ok=True)
            raise MetalError(findings)
        if not target.exists():
            raise MetalError([("compile", said)])
    return target


def _build_counted(target: Path, flags: list, path: Path) -> str:
    """Compile to LLVM's text, add the counting calls, and build that; what the compiler said."""
    text = target.with_suffix(".ll")
    said = _build(text, *flags, "-S", "-emit-llvm", path)
    if not text.exists():
        return said
    counted, blocks = instrument(text.read_text())
    _write(target.with_suffix(".json"), json.dumps(blocks).encode())
    changed = _write(target.with_suffix(".counted.ll"), counted.encode())
    return said + _build(target, "-O1", "-fPIC", "-shared", "-nostdlib", "-w", changed)


def recursive_functions(generated: Generated) -> list[str]:
    """Functions that can reach themselves, from the call graph of the unoptimised code."""
    _, include, _ = _preamble("fast")
    text = f'#include "{KERNELS / "utils.h"}"\n{rewrite(generated.text)}'
    path = _write(CACHE / f"{_digest(text)}.recursion.cpp", text.encode())
    _, listing = run(CXX, *_LANGUAGE, include, "-O0", "-S", "-emit-llvm", "-w", path, "-o", "-")
    calls: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in listing.splitlines():
        if match := re.match(r"define .*?@([\w.$]+)\(", line):
            current = calls.setdefault(match[1], set())
        current.update(re.findall(r"call [^@]*@([\w.$]+)\(", line))

    def reachable(name: str) -> set[str]:
        seen, todo = set(), [*calls[name]]
        while todo:
            callee = todo.pop()
            if callee not in seen:
                seen.add(callee)
                todo += calls.get(callee, ())
        return seen

    return sorted(name for name in calls if name in reachable(name))

"""The text that MLX generates for a custom kernel, obtained without Metal."""

import re
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .arrays import HostArray, mx_dtype

# Bound at import, so that a test that replaces the function in mx.fast does not reach it.
_mlx_metal_kernel = mx.fast.metal_kernel


@dataclass(frozen=True)
class KernelText:
    """What ``mx.fast.metal_kernel`` was given."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated function: a buffer or a thread attribute."""

    name: str
    type: str
    buffer: int | None = None
    by_reference: bool = False


@dataclass(frozen=True)
class Generated:
    """Name, full text and parameters of one specialisation."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]

    @property
    def call(self) -> str:
        """The function to call, with its template arguments."""
        if "decltype(" not in self.text:
            return self.name
        return self.text.rsplit("decltype(", 1)[1].split(")")[0]


def generate(kernel: KernelText, inputs: list[HostArray], **launch) -> Generated:
    """Let MLX write the kernel for these inputs.

    Exporting a function that calls the kernel records its text in the file, Metal or not.
    ``launch`` holds the keyword arguments of the call.
    """
    custom = _mlx_metal_kernel(
        name=kernel.name,
        input_names=list(kernel.input_names),
        output_names=list(kernel.output_names),
        source=kernel.source,
        header=kernel.header,
        ensure_row_contiguous=kernel.ensure_row_contiguous,
        atomic_outputs=kernel.atomic_outputs,
    )
    examples = [mx.zeros(x.data.shape, mx_dtype(x.dtype)) for x in inputs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.mlxfn"
        mx.export_function(str(path), lambda *xs: custom(inputs=list(xs), **launch), *examples)
        exported = path.read_bytes()
    name, text = _read_strings(exported, exported.index(b"custom_kernel_") - 8)
    return Generated(name, text, _parameters(name, text))


def _read_strings(data: bytes, at: int) -> tuple[str, str]:
    """Two consecutive strings of an export, each behind its length."""
    strings = []
    for _ in range(2):
        (length,) = struct.unpack_from("<Q", data, at)
        strings.append(data[at + 8 : at + 8 + length].decode())
        at += 8 + length
    return strings[0], strings[1]


_BUFFER = re.compile(
    r"\s*((?:const )?(?:device|constant) [\w<>]+)\s*([*&]) (\w+) \[\[buffer\((\d+)\)\]\]"
)
_ATTRIBUTE = re.compile(r"\s*(uint3?) (\w+) \[\[")


def _parameters(name: str, text: str) -> tuple[Parameter, ...]:
    start = text.index("(", text.index(f"[[kernel]] void {name}")) + 1
    parameters = []
    for line in text[start : text.index(") {", start)].strip().split("\n"):
        if match := _BUFFER.match(line):
            parameters.append(
                Parameter(match[3], match[1], int(match[4]), by_reference=match[2] == "&")
            )
        elif match := _ATTRIBUTE.match(line):
            parameters.append(Parameter(match[2], match[1]))
        else:
            raise ValueError(f"cannot read the parameter {line!r} of {name}")
    return tuple(parameters)

"""Counts what a launch executes: instructions by class, and bytes of device memory.

A kernel is compiled to LLVM's intermediate text with loops unrolled, as Apple's compiler does it.
Into every basic block goes a call that counts it, and before every load and store one that tells
its address. What the shim does to exchange values between lanes does not count.

A count is not a time: it says how many instructions a GPU's lanes have to issue, for conversions,
shifts and sums alike one each.
"""

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

_ALU = set(
    "add sub mul udiv sdiv urem srem shl lshr ashr and or xor fadd fsub fmul fdiv frem fneg icmp "
    "fcmp select fptrunc fpext uitofp sitofp fptoui fptosi".split()
)
# Calls of the runtime, by the class of their instruction.
_CALLS = {"__msl_simd": "shuffle", "__msl_barrier": "barrier"}
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2, "float": 4,
          "double": 8, "ptr": 8}  # fmt: skip
_ACCESS = re.compile(r"\s+(?:%[\w.]+ = )?(load|store) (?:volatile )?(.*)$")
_INSTRUCTION = re.compile(r"\s+(?:%[\w.]+ = )?(?:tail |musttail |notail )?([a-z]+) (.*)$")
_NOT_MATH = ("lifetime", "noalias", "assume", "memcpy", "memset", "dbg")


@dataclass(frozen=True)
class Counts:
    """What all threads of a launch executed.

    Attributes:
        alu: Arithmetic, conversions and comparisons, by the lane.
        address: Integer arithmetic of 64 bits, which is for addresses.
        branch: Conditional jumps.
        shuffle: Exchanges inside a simdgroup.
        barrier: Barriers.
        threadgroup: Loads and stores of threadgroup memory.
        load, store: Of device memory, a vector once.
        bytes_read, bytes_written: Of device memory in all.
        distinct_bytes: Of device memory that was read, each once.
        threadgroups: In the launch.
    """

    alu: int = 0
    address: int = 0
    branch: int = 0
    shuffle: int = 0
    barrier: int = 0
    threadgroup: int = 0
    load: int = 0
    store: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    distinct_bytes: int = 0
    threadgroups: int = 0

    @property
    def instructions(self) -> int:
        """All but those for addresses, which most loads have built in."""
        return (
            self.alu + self.branch + self.shuffle + self.barrier + self.threadgroup
            + self.load + self.store
        )  # fmt: skip

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Counts(*(a + b for a, b in pairs))


def instrument(text: str) -> tuple[str, list[dict[str, int]]]:
    """Add the calls to a module's text; also return each block's instructions by class."""
    exchanges = _shim_locations(text)
    out: list[str] = []
    blocks: list[dict[str, int]] = []
    inside = fresh = False
    for line in text.splitlines():
        if line.startswith("define "):
            inside = fresh = True
        elif line == "}":
            inside = False
        elif inside and re.match(r"[\w.]+:", line):
            fresh = True
        elif inside and line.strip() and not line.lstrip().startswith((";", "#dbg")):
            if fresh and " = phi " not in line:
                out.append(f"  call void @msl_block(i32 {len(blocks)})")
                blocks.append({})
                fresh = False
            if not fresh:
                own = _location(line) not in exchanges
                _count(line, blocks[-1], own)
                if own and (match := _ACCESS.match(line)):
                    out.append(_access(*match.groups()))
        out.append(line)
    # Inside a function with debug information a call needs a place of its own.
    out = [f"{line}, !dbg !{_some_location(out, i)}" if "call void @msl_" in line else line
           for i, line in enumerate(out)]  # fmt: skip
    hooks = ["void @msl_block(i32)", "void @msl_load(ptr, i32)", "void @msl_store(ptr, i32)"]
    return "\n".join([*out, *(f"declare {hook}" for hook in hooks), ""]), blocks


def _shim_locations(text: str) -> set[str]:
    """Numbers of debug locations in the launcher and where values are exchanged between lanes."""
    files = set(re.findall(r'^!(\d+) = !DIFile\(filename: "[^"]*/simd\.h"', text, re.M))
    scoped = r"^!(\d+) = (?:distinct )?!DI(?:Subprogram|LexicalBlock\w*)\(.*?file: !(\d+)"
    scopes = {number for number, file in re.findall(scoped, text, re.M) if file in files}
    places = re.findall(r"^!(\d+) = (?:distinct )?!DILocation\(.*?scope: !(\d+)", text, re.M)
    # The launcher is the bench's own, too.
    launcher = re.search(r'^!(\d+) = .*DISubprogram\(name: "msl_entry"', text, re.M)
    own = launcher and re.findall(
        rf"^!(\d+) = (?:distinct )?!DILocation\([^)]*scope: !{launcher[1]}\)", text, re.M
    )
    return {number for number, scope in places if scope in scopes} | set(own or ())


def _location(line: str) -> str | None:
    match = re.search(r"!dbg !(\d+)", line)
    return match and match[1]


def _some_location(lines: list[str], index: int) -> str:
    """The location of the next instruction that has one."""
    for line in lines[index:]:
        if (found := _location(line)) and not line.startswith("define "):
            return found
    raise ValueError("no debug location behind a call")


def _count(line: str, block: dict[str, int], own: bool) -> None:
    """Count an instruction; where it is not the kernel's ``own`` only a call of the runtime."""
    match = _INSTRUCTION.match(line)
    if not match:
        return
    name, rest = match.groups()
    kind, times = None, 1
    if own and name == "br" and rest.startswith("i1 "):
        kind = "branch"
    elif name == "call":
        called = re.search(r"@([\w.]+)\(", rest)
        target = called[1] if called else ""
        kind = _CALLS.get(target)
        if own and kind is None and not any(part in target for part in _NOT_MATH):
            kind = None if target.startswith(("__msl", "msl_", "_Z")) else "alu"
    elif own and name in _ALU:
        type_ = re.search(r"(<(\d+) x )?(i\d+|half|bfloat|float|double|ptr)", rest)
        times = int(type_[2]) if type_ and type_[2] else 1
        wide = type_ is not None and type_[3] in ("i64", "ptr") and name not in ("icmp", "select")
        kind = "address" if wide else "alu"
    if kind is not None:
        block[kind] = block.get(kind, 0) + times


def _access(name: str, rest: str) -> str:
    """The call that tells of a load or store."""
    type_ = re.match(r"<(\d+) x (\w+)>|(\w+)", rest)
    size = int(type_[1]) * _SIZES[type_[2]] if type_[1] else _SIZES.get(type_[3], 0)
    pointer = rest[rest.index("ptr ", len(type_[0]) if name == "load" else 0) :]
    if name == "store":
        pointer = rest[rest.rindex(", ptr ") + 2 :]
    pointer = re.split(r", (?:align|!)", pointer)[0]
    return f"  call void @msl_{name}({pointer}, i32 {size})"


def total(blocks: list[dict[str, int]], executed: list[int], memory: list[int]) -> Counts:
    """Put together what the blocks hold, how often they ran, and the accesses."""
    sums = {field.name: 0 for field in fields(Counts)}
    for block, times in zip(blocks, executed, strict=True):
        for kind, count in block.items():
            sums[kind] += count * times
    group_loads, group_stores, *rest = memory
    sums["threadgroup"] = group_loads + group_stores
    names = ("load", "store", "bytes_read", "bytes_written", "distinct_bytes")
    return Counts(**sums | dict(zip(names, rest, strict=True)))


def read_blocks(library: Path) -> list[dict[str, int]]:
    """What the blocks of a compiled kernel hold."""
    return json.loads(library.with_suffix(".json").read_text())

"""Errors put into the package's kernels: the bench has to report every one of them."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_dflash2.kernels._common import load_source
from mlx_dflash2.kernels.cases import all_cases, largest_error

from . import MetalError, Schedule
from .mutate import Mutant, mutants
from .running import run_op

# Large enough that every loop and every barrier of a kernel matters.
FILES = {
    "top_k.metal": ("top_k[2x9001 k16 tied]", "top_k[3x1000 k16]", "top_k[1x253953 k16]"),
    "pair_score.metal": ("pair_score[B1 L2 K64 R40 V300]", "pair_score[B2 L3 K5 R33 V40 padding]"),
    "path_walk.metal": (
        "path_walk[B1 L4 K64 T0.8]",
        "path_walk[B1 L4 K64]",
        "path_walk[B2 L3 K5 T0.8]",
    ),
    "choose.h": ("path_walk[B1 L4 K64 steep]", "path_walk[B1 L4 K64]"),
    "pair_walk.metal": (
        "pair_walk[B1 L2 K64 R40 V300 T8]",
        "pair_walk[B1 L2 K64 R40 V300]",
        "pair_walk[B2 L3 K5 R33 V40 padding T8]",
    ),
    "grouped_conv.metal": ("grouped_conv[B2 L8 H96 G3 K2]",),
    "grouped_conv_norm.metal": ("grouped_conv_norm[B2 L8 H96 G3 K2]",),
    "gated_delta_verify.metal": ("gated_delta_verify[B2 T3 P4 Hk2 Hv4 Dk16 Dv8]",),
    "top_p.metal": ("top_p[2x40 p0.7 tied]", "top_p[2x2500 p0.05 tied]"),
    "ordered_key.h": ("top_p[2x40 p0.7]",),
    "qmm_rows.metal": ("qmm_rows[M5 K1024 N16 g64 b4 offset]", "qmm_rows[M3 K288 N17 g32 b4]"),
    "gated_delta.h": ("gated_delta_verify[B1 T3 P3 Hk1 Hv2 Dk128 Dv16]",),
}
# Bounds on numbers that are within them if nothing is wrong elsewhere, or rounds.
SAFEGUARDS = ("min(uint(kept[b]), P)", "min(simd_sum(reached), uint(K - 1))")
MUTANTS = [
    pytest.param(file, mutant, id=f"{file}: {mutant.label}")
    for file in FILES
    for mutant in mutants(load_source(file))
    if all((guard in mutant.text) == (guard in load_source(file)) for guard in SAFEGUARDS)
]


def reported(file: str, mutant: Mutant, launch) -> bool:
    """Does one of the file's cases end in a finding or in a wrong result?"""
    original = load_source(file)

    def edit(text):
        source = mutant.text if text.source == original else text.source
        return replace(text, source=source, header=text.header.replace(original, mutant.text))

    launch.edit = edit
    for case in (c for c in all_cases() if str(c) in FILES[file]):
        arguments = case.make(mx.float32)
        try:
            outputs = run_op(case.forms()[0], arguments)
        except MetalError as error:
            assert not error.kinds & {"compile", "lint"}, "the mutant does not compile"
            return True
        if largest_error(outputs, case.expected(arguments)) > 1:
            return True
    return False


@pytest.mark.parametrize("file, mutant", MUTANTS)
def test_mutant_is_reported(kernels, file, mutant):
    kernels.schedule = Schedule(seed=1, preempt=7)
    assert reported(file, mutant, kernels)

"""The choice between a kernel and its plain form: made once, by launching, and told once."""

import warnings

import mlx.core as mx
import pytest

from mlx_dflash2.kernels import PlainFormWarning, _common, active_kernels, grouped_conv, top_k
from mlx_dflash2.kernels.grouped_conv import grouped_conv_ops
from mlx_dflash2.kernels.top_k import top_k_ops

LOGITS = mx.array([[1.0, 3.0, 2.0, 3.0]])
REASON = "threadgroup is larger than the pipeline allows"


@pytest.fixture(autouse=True)
def no_memory():
    """Choices and kernel objects of other tests do not count here, nor these elsewhere."""
    _common.LIBRARY.clear()
    yield
    _common.LIBRARY.clear()


@pytest.fixture
def metal(monkeypatch):
    """A Metal on which only the smallest kernel works; the others do what the test says."""

    class Kernel:
        broken_build = broken_call = False
        outputs = staticmethod(lambda shapes, dtypes: [])
        launches = 0

        def __init__(self, name, **text):
            self.name = name
            if self.broken_build and name == "top_k":
                raise RuntimeError(REASON)

        def __call__(self, *, output_shapes, output_dtypes, **launch):
            if self.name == "smallest":
                return [mx.ones((1,))]
            type(self).launches += 1
            if self.broken_call:
                raise ValueError(REASON)
            return self.outputs(output_shapes, output_dtypes)

    monkeypatch.setattr(mx.fast, "metal_kernel", Kernel)
    return Kernel


def zeros(shapes, dtypes):
    return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def expect_plain(reason):
    """The plain form, with one warning for any number of calls; the reason as shown."""
    with pytest.warns(PlainFormWarning) as caught:
        for _ in range(3):
            values, ids = top_k(LOGITS, 2)
    assert ids.tolist() == [[1, 3]]
    assert mx.array_equal(values, top_k_ops(LOGITS, 2)[0]).item()
    assert len(caught) == 1
    assert reason in str(caught[0].message)
    assert active_kernels()["top_k"].startswith("plain: ")
    assert reason in active_kernels()["top_k"]
    return str(caught[0].message)


def test_a_kernel_that_cannot_be_built(metal):
    metal.broken_build = True
    assert "kernel top_k" in expect_plain(REASON)


def test_a_kernel_that_cannot_be_launched(metal):
    metal.broken_call = True
    assert "kernel top_k" in expect_plain(REASON)
    assert metal.launches == 1


def test_a_kernel_that_returns_other_shapes(metal):
    metal.outputs = staticmethod(lambda shapes, dtypes: zeros([(1, 1, 3)] * 2, dtypes))
    expect_plain("shape")


def test_a_kernel_that_returns_other_numbers(metal):
    metal.outputs = staticmethod(zeros)
    expect_plain("differs from the plain form")


def test_one_kernel_gives_way_alone(metal):
    metal.broken_build = True
    expect_plain(REASON)
    pattern = _common.pattern
    probe = pattern((1, 3, 4)), pattern((2, 4), salt=2), pattern((1, 3, 2, 2), salt=3)
    answers = [grouped_conv_ops(*probe), mx.full((1, 2, 4), 7.0)]
    metal.outputs = staticmethod(lambda shapes, dtypes: [answers.pop(0)])
    out = grouped_conv(mx.ones((1, 2, 4)), mx.ones((2, 4)), mx.zeros((1, 2, 2, 2)))
    assert out.tolist() == [[[7.0] * 4] * 2]
    assert active_kernels()["grouped_conv"] == "metal"


def test_no_kernel_can_run_here(monkeypatch):
    """One warning for all kernels, whatever the platform's reason."""

    def unavailable(**text):
        raise RuntimeError("no Metal")

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", unavailable)
    assert "all kernels" in expect_plain("no Metal")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = grouped_conv(mx.ones((1, 2, 4)), mx.ones((2, 4)), mx.zeros((1, 2, 2, 2)))
    assert out.tolist() == [[[1.0] * 4, [2.0] * 4]]
    assert active_kernels()["grouped_conv"] == "plain: no Metal"


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_an_mlx_without_metal_is_not_worth_a_warning(monkeypatch):
    def unavailable(**text):
        raise RuntimeError("[metal_kernel] No Metal back-end.")

    monkeypatch.setattr(mx.fast, "metal_kernel", unavailable)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped_conv(mx.ones((1, 2, 4)), mx.ones((2, 4)), mx.zeros((1, 2, 2, 2)))
    assert active_kernels()["grouped_conv"] == "plain: this MLX has no Metal"


@pytest.mark.filterwarnings("ignore::mlx_dflash2.kernels.PlainFormWarning")
def test_the_choice_belongs_to_a_device(metal, monkeypatch):
    metal.broken_call = True
    top_k(LOGITS, 2)
    assert list(_common.LIBRARY.on(str(mx.default_device())).active()) == ["top_k"]
    assert _common.LIBRARY.on("another device").active() == {}


def test_where_the_cpu_computes_no_kernel_is_used(monkeypatch):
    """MLX launches a kernel on the GPU of a Mac unless it is told a stream of the CPU."""

    class Kernel:
        def __init__(self, **text):
            pass

        def __call__(self, *, stream=None, **launch):
            if stream is not None and stream.device == mx.cpu:
                raise ValueError("Only supports the GPU.")
            return [mx.ones((1,))]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", Kernel)
    assert "all kernels" in expect_plain("Only supports the GPU.")


@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Mac")
@pytest.mark.filterwarnings("ignore::mlx_dflash2.kernels.PlainFormWarning")
def test_the_cpu_of_a_mac_takes_the_plain_form():
    with mx.stream(mx.cpu):
        assert top_k(LOGITS, 2)[1].tolist() == [[1, 3]]
        assert active_kernels()["top_k"].startswith("plain: ")


def test_k_that_no_kernel_takes_is_refused_as_before(metal):
    with pytest.raises(ValueError, match=r"\[1, 4\] but is 5"):
        top_k(LOGITS, 5)

"""The number of launches of a draft cycle stays what it was, or falls."""

from tools.launches import RECORDED, measure, problems


def test_no_phase_launches_more_than_recorded():
    kernels, plain = (
        {name: counter.total() for name, counter in measure(with_kernels).items()}
        for with_kernels in (True, False)
    )
    assert problems(kernels, plain) == []
    assert kernels.keys() == RECORDED.keys()


def test_growth_is_reported():
    recorded = {name: numbers[0] for name, numbers in RECORDED.items()}
    grown = recorded | {"selector": recorded["selector"] + 1}
    plain = {name: numbers[1] for name, numbers in RECORDED.items()}
    assert len(problems(grown, plain)) == 2

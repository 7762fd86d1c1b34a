"""Variants of autotuned kernels are compiled before they are measured."""

import pytest
from megaswift.bridge.kernels.autotuning import parallel_compilation
from triton import Config
from triton.runtime.autotuner import Autotuner


class Tuner(Autotuner):
    def __init__(self, calls, variants):
        self.calls, self.configs = calls, [Config({"SIZE": size}) for size in range(variants)]

    def warmup(self, *args, **kwargs):
        self.calls.append(("compile", args, kwargs))


@pytest.mark.parametrize("variants", [1, 2])
def test_compiles_variants_before_it_measures_them(variants, monkeypatch):
    calls = []
    monkeypatch.setattr(Autotuner, "run", lambda tuner, *args, **kwargs: calls.append(("measure", args, kwargs)))
    measure = Autotuner.run
    tuner = Tuner(calls, variants)
    with parallel_compilation():
        tuner.run(1, grid=(2,), warmup=False, x=3)
    expected = [("compile", (1,), {"grid": (2,), "x": 3}), ("measure", (1,), {"grid": (2,), "warmup": False, "x": 3})]
    assert calls == expected[2 - min(variants, 2) :]
    assert Autotuner.run is measure


def test_leaves_the_autotuner_as_it_was_after_an_error():
    measure = Autotuner.run
    with pytest.raises(ValueError, match="no"), parallel_compilation():
        raise ValueError("no")
    assert Autotuner.run is measure

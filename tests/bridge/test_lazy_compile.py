"""Functions of megatron-core are compiled when they are first called."""

import functools
import subprocess
import sys

import pytest
import torch
from megaswift.bridge.lazy_compile import lazily

PROGRAM = """
import sys
import torch
compiler = torch.compile
import megaswift.bridge.model.build
from megatron.core.jit import jit_fuser
assert jit_fuser is not compiler, "the package ran with PyTorch's own"
assert torch.compile is compiler, "PyTorch's own is not back"
print([name for name in ("torch._inductor.compile_fx", "torch._dynamo") if name in sys.modules])
"""


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return 2 * x


@pytest.fixture
def compiled(monkeypatch):
    """Names of the functions that were compiled, and a lazy compiler."""
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    names: list[str] = []

    def compiler(function, **settings):
        names.append(function.__name__)
        return torch.compile(function, backend="eager", **settings)

    with torch._dynamo.config.patch(disable=False):  # it has read the variable when it was imported
        yield names, lazily(compiler)


def test_compiles_at_the_first_call(compiled) -> None:
    names, compiler = compiled
    direct, decorated = compiler(double), compiler(fullgraph=True)(double)
    assert (direct.__name__, direct.__doc__, names) == ("double", "Twice x.", [])
    for function in (direct, direct, decorated):
        assert function(torch.ones(2)).tolist() == [2, 2]
    assert names == ["double", "double"]


def test_is_a_part_of_a_function_that_calls_it(compiled) -> None:
    names, compiler = compiled
    inner = compiler(double)
    outer = compiler(lambda x: inner(x) + 1, fullgraph=True)
    assert outer(torch.ones(2)).tolist() == [3, 3]
    assert names == ["<lambda>"]


def test_compiles_nothing_where_pytorch_would_not(compiled, monkeypatch) -> None:
    names, compiler = compiled
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert compiler(double)(torch.ones(1)).tolist() == [2]
    assert names == []


def test_leaves_what_is_not_a_function_to_pytorch() -> None:
    partial = functools.partial(double)
    assert lazily(lambda function, **_: ("compiled", function))(partial) == ("compiled", partial)


def test_the_compiler_is_not_loaded_with_megatron_core() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr

"""Tokenizers and configs of transformers without its models, and models without scikit-learn.

transformers imports the base of its models together with AutoTokenizer and AutoConfig, for a class that it adds to
models from Python files, and for names in docstrings. That base needs scikit-learn (if it is installed), SciPy, pandas
and PyTorch's compiler: a thousand modules, and seconds on most machines.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from .imports import change


def enable() -> None:
    """Import transformers' models when they are used, unless they are imported already."""
    change("transformers.models.auto.auto_factory", _without_generation)
    change("transformers.utils.auto_docstring", _without_model_names)
    change("transformers.utils.import_utils", _with_large_cache)
    change("transformers.generation.candidate_generator", _without_scikit_learn)


@contextmanager
def _without_generation(module: ModuleType) -> Iterator[None]:
    """Give the module its GenerationMixin when it adds that to a class."""
    from transformers import generation

    name = "GenerationMixin"
    if name in vars(generation):
        yield
        return
    setattr(generation, name, object)
    try:
        yield
    finally:
        delattr(generation, name)
    add: Any = getattr(module, "add_generation_mixin_to_remote_model", None)
    if add is None or getattr(module, name, None) is not object:
        return

    @functools.wraps(add)
    def add_to_model(model_class: type) -> type:
        setattr(module, name, getattr(generation, name))
        return add(model_class)

    module.add_generation_mixin_to_remote_model = add_to_model  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _without_model_names(module: ModuleType) -> Iterator[None]:
    """Have docstrings of configs name their models by a rule instead of by the table of all models."""
    yield
    modules = getattr(module, "PLACEHOLDER_TO_AUTO_MODULE", {})
    if "model_class" in modules:
        modules["model_class"] = "configuration_auto", "__dict__"  # has no names of models


@contextmanager
def _without_scikit_learn(module: ModuleType) -> Iterator[None]:
    """Import scikit-learn when drafts of assisted generation are judged: it takes a second, with SciPy and pandas."""
    from transformers import utils

    name = "is_sklearn_available"
    is_available = getattr(utils, name)
    setattr(utils, name, lambda: False)
    try:
        yield
    finally:
        setattr(utils, name, is_available)
    setattr(module, name, is_available)
    if is_available() and not hasattr(module, "roc_curve"):
        module.roc_curve = _roc_curve  # pyright: ignore[reportAttributeAccessIssue]


def _roc_curve(*arguments: Any, **settings: Any) -> Any:
    from sklearn.metrics import roc_curve  # pyright: ignore[reportMissingImports]

    return roc_curve(*arguments, **settings)


@contextmanager
def _with_large_cache(module: ModuleType) -> Iterator[None]:
    """Have the files of all models read once: 128 entries are fewer than there are models, so all were read twice."""
    yield
    name = "create_import_structure_from_path"
    if uncached := getattr(getattr(module, name, None), "__wrapped__", None):
        setattr(module, name, functools.cache(uncached))

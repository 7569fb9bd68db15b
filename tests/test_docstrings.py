"""Every example in a docstring of the package runs, and everything public has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import hf_prefix_cache
from hf_prefix_cache.exceptions import MissingPackageError

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# What an example calls when it runs on the packaged real model.
REAL_MODEL = ("load_packaged_model()", "load_model(None)")


def examples():
    modules = [hf_prefix_cache.__name__]
    modules += [found.name for found in pkgutil.walk_packages(hf_prefix_cache.__path__, "hf_prefix_cache.")]
    for name in modules:
        if name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(name)
        except MissingPackageError as error:
            yield pytest.param(None, id=name, marks=pytest.mark.skip(reason=str(error)))
            continue
        for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
            if example.examples:
                real = any(call in example.docstring for call in REAL_MODEL)
                yield pytest.param(example, id=example.name, marks=[pytest.mark.slow] if real else [])


def public_objects():
    for name in hf_prefix_cache.__all__:
        value = getattr(hf_prefix_cache, name)
        raised = inspect.isclass(value) and issubclass(value, Exception)
        if not raised and (inspect.isclass(value) or inspect.isfunction(value)):
            yield pytest.param(value, id=name)


@pytest.mark.parametrize("example", list(examples()))
def test_the_example_in_the_docstring_prints_what_it_says(example):
    report = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(example, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("value", list(public_objects()))
def test_everything_public_shows_an_example(value):
    assert ">>>" in (inspect.getdoc(value) or ""), f"{value.__name__} has no example in its docstring"

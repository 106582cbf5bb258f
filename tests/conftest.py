"""What all tests need before anything is imported: triton's interpreter, hypothesis without a clock, `--examples`.

Interpreted, kernels run on CPU tensors. triton looks at the variable whenever it meets `@triton.jit`, in its own
library too, so it must be set before triton is first imported. Tests that compile kernels do so in a process without
it (tests/kernels/test_triton_compiled.py).
"""

import collections
import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # interpreted kernels are for the CPU, and so are the servers of the tests

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

# No property fails for the time that it takes: a busy machine is no fault. The same examples each time, so that what
# fails is what has changed; others are looked for by `--examples`, as `make soak` does.
settings.register_profile(
    "zjournal", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("zjournal")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=1, help="times as many examples of each property, at random")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _tell_apart(items)
    _try_more(config, items)


def _tell_apart(items: list[pytest.Item]) -> None:
    """Each test has an id of its own: of those that share one, parallel workers run the first only, and say nothing."""
    ids = collections.Counter(item.nodeid for item in items)
    if alike := [name for name, count in ids.items() if count > 1]:
        raise pytest.UsageError(f"tests share their ids: {', '.join(alike)}")


def _try_more(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--examples`: for functions under `@given`, and for state machines."""

    def more(own: settings) -> settings:
        return settings(own, max_examples=own.max_examples * factor, derandomize=False)

    factor = config.getoption("--examples")
    if factor == 1:
        return
    machines, functions = set(), set()  # each once: cases of a parametrized test share their function
    for item in items:
        function = getattr(item, "obj", None)
        machine = getattr(item, "cls", None)
        if machine is not None and isinstance(getattr(machine, "settings", None), settings):
            machines.add(machine)
        elif is_hypothesis_test(function):
            functions.add(getattr(function, "__func__", function))
    for function in functions:
        function._hypothesis_internal_use_settings = more(
            function._hypothesis_internal_use_settings or settings.default
        )
    for machine in machines:
        machine.settings = more(machine.settings)

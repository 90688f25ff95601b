"""Trials: what attnlm promises to survive, tried many times over, from a new seed each day.

`make trials` makes them all. `pytest trials --cases 20` tries 20 cases of each test, and
`pytest 'trials/test_x.py::test_y[7]' --seed 20261127` repeats the case that failed on that day.
"""

import pytest

pytest.register_assert_rewrite("trials.kit", "tests.models")

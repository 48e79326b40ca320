"""Cases that prove again what others prove, on more sizes: `make test` leaves them out, CI and a GPU run them."""

import pytest


def sweep(*cases):
    """The cases of a `pytest.mark.parametrize`, marked `sweep`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.sweep) for case in cases]

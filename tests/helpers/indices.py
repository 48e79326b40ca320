"""What the tests of the ops on index arrays share: numbers that no array holds, and the comparison."""

import numpy as np

MOST = 2**31 - 1
EXTREMES = (-(2**31), -2, -1, 2**30, MOST - 1, MOST)


def same(got, want):
    for name, g, w in zip(("indices", "lens"), got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), w, err_msg=name)
        assert np.asarray(g).dtype == np.int32

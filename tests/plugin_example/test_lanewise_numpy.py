from lanewise_numpy import NumpyBackend

from engine.testing import conformance_tests

test_numpy = conformance_tests(NumpyBackend)

"""For authors of ops and backends: strategies for any legal call, a guarded run, a derived comparison, a conformance suite.

    @given(example=examples(OPS["rope"], ("rope", ("f32", "i32", "f32", "f32"))))
    def test_rope(example):
        got, guards = run_guarded(backend, example)
        assert guards.intact, guards
        assert_close(example, got)

or everything at once: `print(conformance(backend, OPS.values()))`, and for pytest `test_mine = conformance_tests(MyBackend)`.
"""

from engine.testing.claims import check_claim, check_claims
from engine.testing.conformance import Case, Outcome, Report, cases, check_case, check_example, conformance, in_rotation
from engine.testing.example import Example, Layout
from engine.testing.facts import FACTS, Bound, Facts
from engine.testing.graphs import RandomGraph, check_graphs, device_sets, random_graphs, run_graph
from engine.testing.limits import Disagreement, agrees_in_mean, assert_agree, assert_close, assert_same_bits, bits, limits, tolerance
from engine.testing.run import Guards, InterleavedBufferType, check_call, forced, refusal, run_guarded
from engine.testing.strategies import examples
from engine.testing.suite import Check, checks, conformance_tests
from engine.testing.values import elements, quantize_activations, values
from engine.testing_backends import FilteredBackend, FilteredTable, VirtualBackend

__all__ = ["Bound", "Case", "Check", "Disagreement", "Example", "FACTS", "Facts", "FilteredBackend", "FilteredTable", "Guards",
           "InterleavedBufferType", "Layout", "Outcome", "RandomGraph", "Report", "VirtualBackend", "agrees_in_mean",
           "assert_agree", "assert_close", "assert_same_bits", "bits", "cases", "check_call", "check_case", "check_claim",
           "check_claims", "check_example", "check_graphs", "checks", "conformance", "conformance_tests", "device_sets",
           "elements", "examples", "forced", "in_rotation", "limits", "quantize_activations", "random_graphs", "refusal",
           "run_graph", "run_guarded", "tolerance", "values"]

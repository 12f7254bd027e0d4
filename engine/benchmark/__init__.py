"""Timing, the roofline of this machine, and rows: what `lanewise bench` prints, for use from Python.

    backend = registry().get("cpu")
    roofline = measure_roofline(backend)
    for case in cases(OPS["mul_mat"], ["q4_0"], ["m=4096,k=4096,n=1"]):
        print(bench_op(backend, case, roofline).gb_s)
"""

from engine.benchmark.models import ModelRow, ModelTest, bench_model, decode_nbytes, model_type
from engine.benchmark.ops import CUTS, DERIVED, SUITE, OpCase, OpRow, bench_op, cases, make_data, nmse, prepare, sets_of, values
from engine.benchmark.roofline import Roofline, draw_roofline, measure_roofline, pyplot
from engine.benchmark.timing import Machine, Timing, WrongResult, cache_nbytes, compile_seconds, machine, measure

__all__ = ["CUTS", "DERIVED", "SUITE", "Machine", "ModelRow", "ModelTest", "OpCase", "OpRow", "Roofline", "Timing", "WrongResult",
           "bench_model", "bench_op", "cache_nbytes", "cases", "compile_seconds", "decode_nbytes", "draw_roofline", "machine", "make_data",
           "measure", "measure_roofline", "model_type", "nmse", "prepare", "pyplot", "sets_of", "values"]

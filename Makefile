# On a fresh machine with Python 3.11 or newer, `make train` and `make test` install what they need into .venv first.
#   make train ARGS="explorer.batch_size=16"     make test ARGS="tests/common -x"     make PYTHON=python3.12 train
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Processes, each with whole files, whose fixtures are engines; in the order of tests/support/tiers.py. ARGS="-n 8" for more.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Tests start many processes, each of which would compile the package again where this variable is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train check test test-avx2 lint style docs bench setup-train setup-dev setup-bench

train: setup-train
	$(BIN)/python -m trinity_lightning.train +recipe=grpo $(ARGS)

# What starts no engine, program or whole run, and is over within half a second: in two minutes on two cores.
check: style
	$(PYTEST) -m fast $(ARGS)

test: style
	$(PYTEST) $(ARGS)

# As on a CPU with AVX2 alone, which has no bfloat16 products either: for oneDNN, torch, MKL and vLLM.
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-avx2: export PYTHONPATH = $(CURDIR)/tests/support/avx2
test-avx2: test

# Type checking takes minutes on a small machine, hence its place outside `make test`.
lint: style
	$(BIN)/pyright

style: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The documentation, to be opened at site/index.html; a warning is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: setup-dev
	$(BIN)/mkdocs build --strict

# On a GPU: python benchmarks/gpu.py, which takes up to 90 minutes.
bench: setup-bench
	@set -e; for script in $(filter-out benchmarks/gpu.py,$(wildcard benchmarks/[!_]*.py)); do echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

# Builds a release and tries it in an empty environment: minutes, and gigabytes of downloads. ARGS names the extras.
.PHONY: release-check
release-check: setup-dev
	$(BIN)/python scripts/release_check.py $(ARGS)

setup-train:
	@$(PYTHON) scripts/setup.py smollm

setup-dev:
	@$(PYTHON) scripts/setup.py smollm dev

setup-bench:
	@$(PYTHON) scripts/setup.py smollm dev bench ray

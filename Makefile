PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The CPU build of torch cannot load torchvision's compiled operators; tests/shim supplies them.
BENCHMARK := PYTHONPATH=tests/shim $(BIN)/python

.PHONY: demo test test-slow mutants lint format types docs docs-serve coverage releases speed ranking schedules small overhead results clean

demo: $(VENV)/.demo
	$(BIN)/secateur demo

# Tests start many processes, which are faster where Python may keep what it has compiled.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Break the library in many places, one at a time, and see that the tests notice: 15 minutes.
mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants.py

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/.dev
	$(BIN)/pyright

# Into site/, without a network; a broken link is an error. The variable silences a notice of the theme's.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "written to site/index.html"

docs-serve: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

coverage: $(VENV)/.benchmarks
	$(BENCHMARK) benchmarks/coverage.py

# Installs a few hundred packages, one after another: hours. A run that was stopped goes on.
releases: $(VENV)/.benchmarks
	$(BENCHMARK) benchmarks/releases.py --resume

speed: $(VENV)/.benchmarks
	$(BENCHMARK) benchmarks/analysis_speed.py

ranking: $(VENV)/.dev
	$(BIN)/python benchmarks/ranking.py

schedules: $(VENV)/.dev
	$(BIN)/python benchmarks/schedules.py

small: $(VENV)/.dev
	$(BIN)/python benchmarks/small_networks.py

results: $(VENV)/.dev
	$(BIN)/python benchmarks/results_page.py

overhead: $(VENV)/.dev
	$(BIN)/python benchmarks/gate_overhead.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of packages: a second call installs nothing until the requirements change.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[demo,report]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[demo,report,export,vision,dev]'
	touch $@ $(VENV)/.demo

$(VENV)/.benchmarks: $(VENV)/.dev
	$(INSTALL) torch-pruning pytorchcv
	touch $@

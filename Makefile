# Everything runs in .venv, which is created by the first target that needs it. Requires Python 3.10 or newer, but no
# compiler.
PYTHON ?= python3
VENV ?= .venv
# Run two processes with one thread each. Most tests are small, and more threads than cores would slow them down.
PYTEST_ARGS ?= -n 2 --dist worksteal

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py) $(shell find torchlml/_cpu/csrc -type f 2>/dev/null)

CPP := $(wildcard torchlml/_cpu/csrc/*.h torchlml/_cpu/csrc/*.cpp tools/*.h tools/*.cpp)
WORKFLOWS := $(wildcard .github/workflows/*.yml)
# The tests that are most likely to fail after a change: arguments, special rows, losses, metrics and public names.
QUICK := $(addprefix tests/library/test_,arguments.py special_rows.py losses_definitions.py losses_targets.py \
	losses_modules.py metrics_topk.py compat.py public_names.py)

.DEFAULT_GOAL := help
.PHONY: help demo test all-tests test-torch quick quick-tests lint format bench pictures asan fuzz fuzz-avx512 wheel sdist test-wheel cross docs docs-serve install clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(STAMP)  ## train five losses on images with missing labels and write a report
	$(BIN)/torchlml demo

test: $(STAMP)  ## run the linters, the type checker and all tests
	@$(MAKE) --no-print-directory -j2 lint all-tests

# `make test` runs this target in parallel with the type checker, which needs one core for a minute.
all-tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

test-torch: $(STAMP)  ## run all tests with pure PyTorch instead of the compiled kernel
	OMP_NUM_THREADS=1 TORCHLML_KERNEL=torch $(BIN)/python -m pytest $(PYTEST_ARGS)

quick: $(STAMP)  ## run the linters, the type checker and the most important tests in under a minute
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint quick-tests

quick-tests: $(STAMP)
	$(BIN)/python -m pytest -q $(QUICK)

lint: $(STAMP)  ## run ruff, mypy and clang-format, and check the workflows against their schema
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows $(WORKFLOWS)

format: $(STAMP)  ## fix and format the code with ruff and clang-format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

bench: $(STAMP)  ## compare the speed of lml with that of softmax and append the times to results/benchmarks.csv
	$(BIN)/torchlml bench layer --csv results/benchmarks.csv

# `make pictures` needs only the CSV files in results/, to which `make bench` and the commands in docs/ append.
FIGURE := $(BIN)/torchlml figures
pictures: $(STAMP)  ## redraw the pictures in the documentation, except routing.png and social-card.png
	for name in entropies polytopes projection root-finding sets which-relaxation; do \
		$(FIGURE) $$name --out docs/images/$$name.png || exit 1; done
	$(FIGURE) sliding-sigmoid --out docs/images/sliding-sigmoid.gif
	$(BIN)/python docs/images/numerics.py
	$(FIGURE) benchmarks --out results/benchmarks.png
	$(FIGURE) bandwidth --csv results/benchmarks.csv --out results/bandwidth.png
	$(FIGURE) alternatives --csv results/alternatives.csv --out results/alternatives.png
	$(FIGURE) own-data --csv results/own-data/own-data.csv --out results/own-data/own-data.png
	$(FIGURE) timing --csv results/paper-timing.csv --out results/paper-timing.png
	for name in features images images-16 wide; do \
		$(FIGURE) cifar100 --csv results/cifar100/$$name.csv --out results/cifar100/$$name.png || exit 1; done
	for data in vg vrd; do \
		$(FIGURE) scene-graph --csv results/scene-graph/$$data.csv --out results/scene-graph/$$data.png || exit 1; \
		$(FIGURE) scene-graph-bias --csv results/scene-graph/$$data-bias.csv --out results/scene-graph/$$data-bias.png || exit 1; done
	$(FIGURE) multilabel --out results/multilabel/kept-labels.png
	$(FIGURE) recommend --out results/recommend/gowalla.png
	$(FIGURE) which-k --csv results/which-k/which-k.csv --out results/which-k/which-k.png
	$(FIGURE) missing-labels --csv results/missing-labels/results.csv --out results/missing-labels/missing-labels.png

asan: $(STAMP)  ## run the compiled kernels under AddressSanitizer and UBSan
	$(BIN)/python tools/sanitize.py

SECONDS ?= 60
fuzz: $(STAMP)  ## compare the kernel with a float64 reference on random rows for SECONDS seconds (default 60)
	$(BIN)/python tools/fuzz.py --seconds $(SECONDS)

fuzz-avx512: $(STAMP)  ## like fuzz, but for the AVX-512 kernel, emulated on a processor that has only AVX2
	$(BIN)/python tools/emulate_avx512.py tools/fuzz.py --seconds $(SECONDS)

# auditwheel determines the oldest compatible manylinux platform and adds it to the file name. torch's library is
# excluded, because it is part of the torch package.
wheel: $(STAMP)  ## build a wheel with the compiled kernel into dist/
	rm -rf build/wheel dist/*.whl
	PYTHONWARNINGS=ignore $(PIP) wheel -q --no-deps --no-build-isolation -w build/wheel .
	@mkdir -p dist
ifeq ($(shell uname -s),Linux)
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so -w dist build/wheel/*.whl
else
	cp build/wheel/*.whl dist/
endif

sdist: $(STAMP)  ## build the source distribution into dist/
	rm -f dist/*.tar.gz
	$(BIN)/python setup.py -q sdist

ENVIRONMENTS ?= build/environments
test-wheel: wheel sdist  ## audit the wheel, and test the wheel and the sdist in clean environments (kept in ENVIRONMENTS)
	$(BIN)/python tools/test_wheel.py dist --environments $(ENVIRONMENTS)

cross:  ## compile the kernels with other compilers and for other processors, and check their results
	$(PYTHON) tools/cross.py

docs: $(STAMP)  ## build the site into site/, treating warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)  ## build and serve the site, with live reload
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

install: $(STAMP)  ## create .venv and install the package with all development tools

# Install torch first, in the version from constraints.txt, because the build below compiles against the installed torch.
# `-c` prevents later steps from replacing it with another build, which may download gigabytes.
$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("torchlml requires Python 3.10 or newer, but $(PYTHON) is " + sys.version.split()[0] + ". Try make PYTHON=python3.12.")'
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -r constraints.txt "setuptools>=77" wheel
	@# PYTHONWARNINGS hides a setuptools warning about editable installations.
	PYTHONWARNINGS=ignore $(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

clean:  ## remove build outputs and caches, but keep .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis torchlml-demo
	find torchlml torchlml_lab tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f torchlml/_cpu/*.so torchlml/_cpu/_absent.txt $(STAMP)

# Everything runs in .venv, which the first target that needs it creates. Needs Python 3.10 or newer; no compiler.
PYTHON ?= python3
VENV ?= .venv
# Two processes, each with one thread: most tests are small.
PYTEST_ARGS ?= -n 2 --dist worksteal

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py) $(shell find torchlml/_cpu/csrc -type f 2>/dev/null)

CPP := $(wildcard torchlml/_cpu/csrc/*.h torchlml/_cpu/csrc/*.cpp tools/*.cpp)
WORKFLOWS := $(wildcard .github/workflows/*.yml)
# What breaks first when the library changes: arguments, special rows, accuracy and gradients, every loss.
QUICK := $(addprefix tests/library/test_,arguments.py special_rows.py losses_definitions.py losses_targets.py \
	losses_modules.py metrics_topk.py compat.py public_names.py)

.DEFAULT_GOAL := help
.PHONY: help demo test test-torch quick quick-tests lint format bench asan fuzz wheel sdist test-wheel cross docs docs-serve install clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(STAMP)  ## train five losses on images with hidden labels, and report what each learned
	$(BIN)/torchlml demo

test: lint  ## lint, types and tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-torch: $(STAMP)  ## the tests again with the pure-torch kernel
	TORCHLML_KERNEL=torch $(BIN)/python -m pytest $(PYTEST_ARGS)

quick: $(STAMP)  ## the inner loop: lint, types and the tests that break first, in under a minute
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint quick-tests

quick-tests: $(STAMP)
	$(BIN)/python -m pytest -q $(QUICK)

lint: $(STAMP)  ## ruff, mypy, clang-format and the workflows' schema
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows $(WORKFLOWS)

format: $(STAMP)  ## let ruff and clang-format repair and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

bench: $(STAMP)  ## time lml beside softmax and append to results/benchmarks.csv
	$(BIN)/torchlml bench layer --csv results/benchmarks.csv

asan: $(STAMP)  ## run the compiled kernels under AddressSanitizer and UBSan
	$(BIN)/python tools/sanitize.py

SECONDS ?= 60
fuzz: $(STAMP)  ## throw random rows at the kernel and at a float64 truth, for SECONDS=60
	$(BIN)/python tools/fuzz.py --seconds $(SECONDS)

# auditwheel puts the oldest Linux into the name that the libraries asked for can be found on; torch's own library is
# found in torch.
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
test-wheel: wheel sdist  ## audit both, install them into clean environments (kept in ENVIRONMENTS) and test them there
	$(BIN)/python tools/test_wheel.py dist --environments $(ENVIRONMENTS)

cross:  ## the kernels by other compilers and for other processors, against the truth in float64
	$(PYTHON) tools/cross.py

docs: $(STAMP)  ## build the site into site/, without a warning or not at all
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)  ## build the site and show it while it is edited
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

install: $(STAMP)  ## only create .venv and install the package with everything for development

# torch comes first and from constraints.txt, because the build below compiles against the torch it finds and
# because any other torch pulls gigabytes. `-c` keeps every later step from replacing it.
$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("torchlml needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.12.")'
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -r constraints.txt "setuptools>=77" wheel
	@# setuptools warns that an editable installation is editable; PYTHONWARNINGS keeps that off the first screen.
	PYTHONWARNINGS=ignore $(PIP) install -q -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

clean:  ## remove what was built and cached, keep .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis torchlml-demo
	find torchlml torchlml_lab tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f torchlml/_cpu/*.so torchlml/_cpu/_absent.txt $(STAMP)

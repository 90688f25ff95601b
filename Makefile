# `make demo` and `make test` set up everything that they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
APT = [ "$$(id -u)" = 0 ] && timeout 60 apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive timeout 240 apt-get install --yes --quiet=2

.PHONY: help demo test test-all index newest oldest wheel processors browser arm64 emulator cuda test-slow trials patches audit bench site notebook package format clean

help:
	@echo "make demo       environment, install, then prepare, train and sample, offline"
	@echo "make test       environment, install, then lint, types and the tests of a change;"
	@echo "                WITH=\"pages documents compilers variants\" adds others"
	@echo "make test-all   everything, before a release; takes an hour; passes to .ci/green"
	@echo "make newest     every command with the newest versions of all dependencies; needs a network"
	@echo "make oldest     the same with the oldest versions that pyproject.toml allows"
	@echo "make index      check that packages can be installed, as both require"
	@echo "make processors the numerical tests as on other processors, NAMES=\"AVX2 SSE …\" or all"
	@echo "make browser    install Chromium for the tests of pages; needs apt-get and root"
	@echo "make arm64      install an emulator of ARM64 for it; needs apt-get and root"
	@echo "make emulator   install emulators of ARM64 and Windows"
	@echo "make cuda       the tests of an NVIDIA GPU, then GPT-2's speed on it"
	@echo "make test-slow  the tests that take minutes"
	@echo "make trials     robustness tests, TRIALS=\"kill or disk\" or all; CASES=20: so many of each test"
	@echo "make patches    check that the tests notice faults made on purpose"
	@echo "make audit      known vulnerabilities in the dependencies; needs a network"
	@echo "make bench      compare speed with other programs, PARTS=\"steps sample …\" or all"
	@echo "make site       the documentation as HTML, in build/site"
	@echo "make notebook   run docs/ladder.ipynb and save its outputs"
	@echo "make package    the distributions in dist, built twice, checked and tried"
	@echo "make format     format the code as \`make test\` requires"
	@echo "make clean      remove the environment and what the demo made"

# Changed C files are compiled again.
$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard src/attnlm/compute/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "attnlm needs Python 3.11 or later; try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/attnlm prepare tales --data-dir build/demo/data
	$(BIN)/attnlm train --steps 1000 --seed 1 \
		--data-dir build/demo/data --checkpoint-dir build/demo/checkpoints
	$(BIN)/attnlm sample --tokens 500 --seed 1 --checkpoint-dir build/demo/checkpoints
	@echo "The run is in build/demo/checkpoints. For another text: source $(BIN)/activate, then"
	@echo "attnlm sample --checkpoint-dir build/demo/checkpoints"

# What only `make test-all` runs, but for what WITH names. Types are checked beside the tests. The many processes
# that tests start share compiled modules, even where Python is told to keep none.
LATER := $(filter-out $(WITH),slow pages documents compilers variants)
EMPTY :=
test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/oxlint src/attnlm/see/pages
	@mkdir -p build
	@$(BIN)/mypy >build/types 2>&1 & types=$$!; \
	tests='not ($(subst $(EMPTY) $(EMPTY), or ,$(LATER)))'; \
	echo "$(BIN)/pytest -m '$$tests' --numprocesses 2 --dist worksteal"; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "$$tests" --numprocesses 2 --dist worksteal; tests=$$?; \
	echo '$(BIN)/mypy'; wait $$types; types=$$?; cat build/types; \
	exit $$((tests ? tests : types))

# Then the commit is green: .ci/run compares later changes with it.
test-all: $(READY)
	@mkdir -p build
	@[ -z "$$(git status --porcelain)" ] || { echo "commit what has changed first" >&2; exit 1; }
	git rev-parse HEAD >build/green
	$(MAKE) test WITH="pages documents compilers variants"
	for system in darwin win32; do \
		$(BIN)/mypy --platform $$system --cache-dir .mypy_cache/$$system src || exit 1; done
	$(MAKE) test-slow processors
	$(MAKE) trials CASES=20
	if $(MAKE) index; then $(MAKE) --old-file index newest oldest; fi
	cp build/green .ci/green

# Fails, and says why, if packages cannot be installed: for CI, which leaves the two below out then.
index:
	$(PYTHON) -m venv build/index
	build/index/bin/python -m pip download --quiet --no-deps --dest build/index/downloads typer

wheel: index
	rm -rf build/wheel
	build/index/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .

# As a user installs it, with the newest versions or the oldest that pyproject.toml allows. PyTorch is
# the one of constraints.txt, since each of them is large: `make oldest TORCH=2.6.0` takes another.
newest oldest: wheel
	$(PYTHON) -m venv --clear build/$@
	echo torch==$(TORCH) >build/$@/versions.txt
	[ $@ = newest ] || sed -n 's/^    "\([a-z0-9-]*\)>=\([0-9.]*\)",$$/\1==\2/p' pyproject.toml | \
		grep -v '^torch==' >>build/$@/versions.txt
	build/$@/bin/python -m pip install --quiet --constraint build/$@/versions.txt torch
	build/$@/bin/python -m pip install --quiet --constraint build/$@/versions.txt \
		--upgrade --upgrade-strategy eager build/wheel/*.whl
	env -u PYTHONPATH build/$@/bin/python -m tools.use_installed

# The tests of pages are skipped without it.
browser:
	@command -v chromium || command -v chromium-browser || \
		{ $(APT) chromium >/dev/null; } || \
		{ echo "install Chromium from your system's packages, as chromium" >&2; exit 1; }

processors: $(READY)
	$(BIN)/python -m tools.on_processors $(NAMES)

# `make processors` skips ARM64 and Windows without them.
arm64:
	@{ command -v aarch64-linux-gnu-gcc && command -v qemu-aarch64; } || \
		{ $(APT) gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user >/dev/null; } || \
		{ echo "install an ARM64 compiler and qemu-user from your system's packages" >&2; exit 1; }

emulator: arm64
	@command -v wine || { $(APT) wine wine64 >/dev/null; } || \
		{ echo "install wine from your system's packages" >&2; exit 1; }

cuda: $(READY)
	ATTNLM_TEST_CUDA=1 $(BIN)/pytest tests/compute/test_cuda.py
	$(BIN)/python -m benchmarks gpu

test-slow: $(READY)
	$(BIN)/pytest -m slow

trials: $(READY)
	$(BIN)/pytest trials $(if $(TRIALS),-k "$(TRIALS)") $(if $(CASES),--cases $(CASES))

patches: $(READY)
	$(BIN)/python -m tools.patches

audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	@build/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip \
		2>build/audit/log || { grep -v '^WARNING' build/audit/log | tail -n 1 | cut -c 1-300 >&2; \
		echo "audit failed: vulnerabilities above, or versions that could not be looked up" >&2; exit 1; }

bench: $(READY)
	$(BIN)/python -m benchmarks $(PARTS)

# Warnings, such as a link that leads nowhere, are errors.
site: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs build/site
	@echo build/site/index.html

notebook: $(READY)
	$(BIN)/python docs/run_notebook.py

package: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[package]'
	$(BIN)/python -m tools.check_packages
	$(MAKE) newest oldest

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build

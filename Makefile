# Targets for developers and CI; `make` lists them.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test sanitize kernel-report compat triton-versions dist cuda-build-check bench bench-full bench-report results lint format doctor clean

PYTHON ?= python3.11
BIN := .venv/bin
SITE := .venv/lib/python3.11/site-packages
LOG := .venv/setup.log
CSRC := $(wildcard $(addprefix csrc/,*.h */*.h */*.cpp */*.cuh */*.cu))

# Otherwise DGL prints and writes a file in the home folder on its first import.
export DGLBACKEND := pytorch
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

setup: .venv/ready ## create .venv with the pinned packages and this package, editable
	@echo "ready: make demo, make test, make doctor"

demo: .venv/ready ## train on a synthetic dataset and print the selected layers
	@$(BIN)/metselect demo

test: .venv/ready ## run the tests
	$(BIN)/python -m pytest

# Python itself is not sanitized, so the runtime is preloaded, with libstdc++, whose exceptions it
# intercepts. -fno-wrapv: Python's own flags define signed overflow. --capture=sys: a report is not
# written through sys.stderr.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-wrapv -g -O1
no_asan = '$${CXX:-c++}' has no libasan.so; use GCC with its sanitizers (on Debian: apt install g++)
library = $$($${CXX:-c++} -print-file-name=$1)

sanitize: .venv/ready ## run the tests of the ops with address and undefined-behaviour sanitizers
	@[ -e "$(call library,libasan.so)" ] || { echo "sanitize: $(no_asan)" >&2; exit 1; }
	export XDG_CACHE_HOME=$(CURDIR)/build/sanitize; \
	METSELECT_CXXFLAGS="$(SANITIZE)" $(BIN)/metselect build || exit 1; \
	export METSELECT_BACKEND=native \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$(call library,libasan.so) $(call library,libstdc++.so)"; \
	ops=$$($(BIN)/python -c 'from metselect_dgl.ops import OPS; print(*OPS)') && \
	  $(BIN)/python -m pytest --capture=sys $$(for op in native "*ops" $$ops; do ls tests/test_$$op.py 2>/dev/null; done)

kernel-report: .venv/ready ## compile every GPU kernel ahead of time and write docs/appendix/kernels.md (minutes)
	$(BIN)/python -m benchmarks.kernel_report --out docs/appendix/kernels.md

compat: ## run the tests with several versions of Python, torch and dgl and write docs/compatibility.md (hours, gigabytes)
	$(PYTHON) tests/compatibility.py

triton-versions: .venv/ready ## compile and interpret the Triton kernels with Triton 3.0 to 3.9
	$(BIN)/python tests/triton_versions.py

dist: ## build wheel and sdist in dist/ and try both in an empty environment (minutes, downloads torch and dgl)
	$(PYTHON) tests/dist_check.py

cuda-build-check: ## compile the CUDA ops against torch's CUDA build and list them (downloads gigabytes)
	$(PYTHON) tests/cuda_build_check.py

BENCH := $(BIN)/python -m pytest benchmarks --benchmark-only
RESULTS := benchmarks/results

bench: .venv/ready ## time epochs and ops and compare them with DGL, plain torch and others (ten minutes)
	@mkdir -p build
	$(BENCH) --benchmark-json build/bench.json

# The results are moved at the end: a changed file would mark the commit as modified.
bench-full: .venv/ready ## time all sizes, and the quick set twice, and write benchmarks/RESULTS.md (two hours)
	@mkdir -p build/bench $(RESULTS)
	$(BENCH) --set full --benchmark-json build/bench/full.json
	$(BENCH) --keep-memory -k epoch --benchmark-json build/bench/kept.json
	for n in 1 2; do $(BENCH) --benchmark-json build/bench/quick-$$n.json || exit 1; done
	$(BIN)/python -m benchmarks.guard build/bench/guard.json
	mv build/bench/*.json $(RESULTS)/
	$(MAKE) bench-report

bench-report: .venv/ready
	$(BIN)/python -m benchmarks.report $(filter-out %/guard.json,$(sort $(wildcard $(RESULTS)/*.json))) \
	  --again $(RESULTS)/quick-*.json --guard $(RESULTS)/guard.json --out benchmarks/RESULTS.md

results: .venv/ready ## repeat the paper's tables and figures: docs/results.md (hours; resumes if interrupted)
	$(BIN)/metselect reproduce --out docs/results --page docs/results.md

lint: .venv/ready ## check the style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(CSRC),$(BIN)/clang-format --dry-run -Werror $(CSRC) $(wildcard tests/emulation/*.h))

format: .venv/ready ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CSRC),$(BIN)/clang-format -i $(CSRC) $(wildcard tests/emulation/*.h))

doctor: .venv/ready ## check this installation and suggest remedies
	@$(BIN)/python -m metselect_dgl.doctor

clean: ## remove build products; the packages in .venv stay
	rm -rf build dist *.egg-info .benchmarks .hypothesis .pytest_cache .ruff_cache
	rm -f .venv/ready
	find . -name .venv -prune -o -name __pycache__ -exec rm -rf {} +

no_python = '$(PYTHON)' is not Python 3.11; install it, or name yours: make setup PYTHON=/path/to/python3.11
no_venv = '$(PYTHON)' lacks the venv module (on Debian: apt install python3.11-venv); install it and run the same command again
no_space = the disk is full; make room and run the same command again (log: $(LOG))
no_packages = the packages could not be downloaded: no network, or the package index is unreachable or has none for this machine; run the same command again (log: $(LOG))
no_build = the packages are installed but metselect_dgl itself could not be built; the reason is at the end of $(LOG)
no_compiler = no C++ compiler found: continuing without compiled kernels, the ops run in plain PyTorch
no_engine = the C++ compiler could not build the kernels: continuing without, the ops run in plain PyTorch (reason: $(LOG))
die = { echo "setup: $($1)" >&2; exit 1; }
whole_venv = $(BIN)/python -m pip --version 2>/dev/null | grep -q 'python 3.11' && ls $(SITE)/pip-*.dist-info >/dev/null 2>&1

# An interrupted call is completed by the next one: the stamp is written last, and a package that
# pip did not finish lacks INSTALLER; without its .dist-info pip installs it again.
.venv/ready: requirements.txt requirements-dev.txt setup.py pyproject.toml metselect_dgl/build.py $(CSRC)
	@for info in $(SITE)/*.dist-info; do [ -e "$$info/INSTALLER" ] || rm -rf "$$info"; done
	@$(whole_venv) || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || $(call die,no_python); \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call die,no_venv); \
	  $(PYTHON) -m venv --clear .venv; }
	@command -v $${CXX:-c++} >/dev/null || echo "setup: $(no_compiler)" >&2
	@printf "installing torch, dgl and other packages into .venv (1.5 GB with torch's CPU build, once) "
	@set -o pipefail; $(BIN)/python -m pip install --no-input -r requirements-dev.txt 2>&1 | tee $(LOG) | \
	  { while read -r word _; do [ "$$word" != Collecting ] || printf .; done; echo; } || { \
	  ! grep -q 'No space left' $(LOG) || $(call die,no_space); $(call die,no_packages); }
	@echo "building the package and its compiled kernels (a minute or two, once)"
	@$(BIN)/python -m pip install -v --no-input --no-build-isolation --no-deps -e . >>$(LOG) 2>&1 || $(call die,no_build)
	@$(BIN)/python -c 'from metselect_dgl import build; raise SystemExit(not build.built())' || ! command -v $${CXX:-c++} >/dev/null || echo "setup: $(no_engine)" >&2
	@touch $@

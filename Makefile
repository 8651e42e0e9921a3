# kvkeeper: everything from a bare clone. `make help` lists the targets.
#
# TORCH=cpu      take torch's CPU build from PyTorch's own index (a laptop without CUDA saves several GB)
# MODEL=...      what `make up` serves: smollm2, which is fetched once, or a Hugging Face folder
# PYTHON=...     interpreter for the virtual environment, 3.11 or 3.12

PYTHON ?= python3
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX := $(if $(filter cpu,$(TORCH)),--index-url https://download.pytorch.org/whl/cpu)
PROTOS := $(shell find protos -name '*.proto')
GENERATED := $(PROTOS:.proto=_pb2.py)
TEST_NEEDS = $(VENV)/.dev $(GENERATED) clients/node/node_modules/.installed

# Tests start hundreds of processes: each would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
BUNDLE := gpu-bundle
.PHONY: help install install-core proto up demo lint format docs check test test-end-to-end test-serving test-kernels test-computing test-core test-core-alone test-lint test-whole test-fast bench soak gpu-check gpu-bundle vllm-check model-check clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | column -t -s '	'

define check_python
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	    || { echo "kvkeeper needs Python 3.11 or 3.12; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
endef

# $(1): extras of pyproject.toml.
define install
	$(check_python)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch==2.13.0 $(TORCH_INDEX)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
	$(BIN)/python -c 'from kvkeeper.kernels.cpu import compiled; compiled.switch(on=True); [compiled.prepare(dtype) for dtype in compiled.DTYPES]'  # else the first engine compiles
	touch $(VENV)/.run
endef
comma := ,

$(VENV)/.run: constraints.txt pyproject.toml $(PROTOS)
	$(call install,engine$(comma)cpu)

# Not on top of .run, which would build and install our own package a second time.
$(VENV)/.dev: constraints.txt pyproject.toml $(PROTOS)
	$(call install,engine$(comma)cpu$(comma)dev)
	touch $@

clients/node/node_modules/.installed: clients/node/package.json clients/node/package-lock.json
	@command -v npm >/dev/null || { echo "the Node client's test needs npm (Node 18 or newer)"; exit 1; }
	cd clients/node && npm ci --no-audit --no-fund
	touch $@

install: $(VENV)/.dev  ## the virtual environment with everything that development needs

proto: $(VENV)/.dev  ## generate the protobuf code beside the protos
	$(BIN)/python protos/build_backend.py

$(GENERATED) &: $(PROTOS) $(VENV)/.dev
	$(BIN)/python protos/build_backend.py

# What converts a model, beside what is installed.
$(VENV)/.gguf: $(VENV)/.run
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt $$($(BIN)/python -c 'from kvkeeper.common.service.extras import packages; print(*packages("gguf"))')
	touch $@

up: $(VENV)/.run $(if $(filter smollm2,$(MODEL)),$(VENV)/.gguf)  ## start both services: with MODEL=smollm2 (a real one, fetched once), or the demo model
	$(BIN)/kvkeeper up $(if $(MODEL),--model '$(MODEL)')

demo: $(VENV)/.run  ## what kvkeeper does, in a minute
	$(BIN)/kvkeeper demo

lint: $(VENV)/.dev $(GENERATED)  ## ruff, buf, mypy, directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint protos
	$(BIN)/mypy -p kvkeeper.cache_service -p kvkeeper.engine_service -p kvkeeper.kernels
	$(BIN)/mypy tests/benchmarks tests/gpu tests/model_check
	$(BIN)/mypy -p docs.generate
	$(BIN)/mypy -p kvkeeper.client -p kvkeeper.cli -p kvkeeper.common -p kvkeeper.http -p kvkeeper.vllm
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## let ruff format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev $(GENERATED)  ## write the generated pages of docs/
	$(BIN)/python -m docs.generate

test: $(TEST_NEEDS)  ## all tests, in five lanes; of one folder: .venv/bin/pytest tests/unit/cache_service/core/index
	$(MAKE) --no-print-directory -j5 test-end-to-end test-serving test-kernels test-computing test-core

test-whole: export KVKEEPER_TESTS := whole
test-whole: test  ## all tests, with the whole of what `make test` runs a slice of

check: $(TEST_NEEDS)  ## what has to pass before a merge: lint and all tests, side by side
	$(MAKE) --no-print-directory -j6 test-end-to-end test-serving test-kernels test-computing test-core test-lint

# What starts services and keeps time goes in two lanes: while the one waits, the other has the processors.
END_TO_END := tests/e2e
# What only computes: it keeps no time and starts no services, so it may wait for a processor.
CORE := tests/unit/cache_service/core tests/sim
KERNELS := tests/unit/kernels
COMPUTING := tests/unit/engine_service/model tests/unit/engine_service/scheduler tests/unit/engine_service/compute tests/contracts \
    tests/packaging
# What the core's tests need: neither torch nor gRPC nor npm.
CORE_ALONE := numpy pytest pytest-asyncio pytest-timeout hypothesis xxhash
# Shown when it has ended. $(1): how far it is behind what else wants a processor; 19 is behind all else.
define in_background
	@mkdir -p build
	@nice -n $(1) $(2) >build/$@.log 2>&1; code=$$?; cat build/$@.log; exit $$code
endef

test-end-to-end: $(TEST_NEEDS)  ## the lane of both services together
	$(call in_background,0,env PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(END_TO_END))

test-serving: $(TEST_NEEDS)  ## the lane of each service, of clients and of the soak: all tests but those of the other lanes
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(addprefix --ignore=,$(END_TO_END) $(CORE) $(KERNELS) $(COMPUTING))

test-kernels: $(TEST_NEEDS)  ## the lane of the kernels
	$(call in_background,19,env PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(KERNELS))

test-computing: $(TEST_NEEDS)  ## the lane of models, the scheduler, documents and packages
	$(call in_background,19,env PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(COMPUTING))

test-core: $(TEST_NEEDS)  ## the lane of the cache service's core, with its simulations
	$(call in_background,19,$(BIN)/python -m pytest $(CORE))

install-core: .venv-core/.installed  ## a small virtual environment, in half a minute: the tour and the core's tests run in it

.venv-core/.installed: constraints.txt
	$(check_python)
	$(PYTHON) -m venv .venv-core
	.venv-core/bin/pip install --disable-pip-version-check -c constraints.txt $(CORE_ALONE)
	echo "$(CURDIR)/clients/python" >"$$(.venv-core/bin/python -c 'import site; print(site.getsitepackages()[0])')/kvkeeper.pth"
	touch $@

test-core-alone: .venv-core/.installed  ## the tests of the core without torch, gRPC or npm
	.venv-core/bin/python -m pytest $(CORE) tests/unit/cache_service/test_tiny_cache.py

test-lint: $(TEST_NEEDS)  ## lint, behind the tests
	$(call in_background,19,$(MAKE) --no-print-directory lint)

# What the inner loop leaves to `make test`: Hypothesis machines, workloads, interpreted kernels, many models.
SLOW := tests/unit/cache_service/core/test_machine.py tests/unit/cache_service/core/test_tier_machine.py \
    tests/unit/cache_service/core/eviction/test_machine.py tests/unit/cache_service/core/eviction/test_workloads.py \
    tests/unit/kernels/gpu tests/unit/kernels/attention/test_paged_attention.py \
    tests/unit/engine_service/model/test_architectures.py tests/unit/engine_service/model/test_demo_model.py \
    tests/unit/engine_service/model/test_numerics.py tests/unit/engine_service/model/test_retention_numerics.py \
    tests/unit/engine_service/scheduler/test_branching_mix.py tests/unit/engine_service/scheduler/test_swap_mix.py \
    tests/unit/engine_service/scheduler/test_progress.py \
    tests/unit/engine_service/scheduler/test_branching.py::test_any_searches_in_any_pool_give_what_a_search_in_one_place_gives \
    tests/unit/engine_service/scheduler/test_scheduler.py::test_any_arrivals_in_any_pool_end_with_the_right_tokens \
    tests/unit/engine_service/scheduler/test_transitions.py::test_a_mix_makes_these_transitions_and_no_others

test-fast: $(VENV)/.dev $(GENERATED)  ## the contracts and the unit tests but for the slow ones, for the inner loop; says what it leaves out
	$(BIN)/python -m pytest tests/contracts tests/unit $(foreach one,$(SLOW),$(if $(findstring ::,$(one)),--deselect=$(one),--ignore=$(one))) \
	    --durations=5 --durations-min=2
	@echo "left out: every folder of tests/ but contracts and unit, and of these:" && printf '  %s\n' $(SLOW)

bench: $(VENV)/.dev $(GENERATED)  ## one JSON line per figure; ONLY=step runs one
	$(BIN)/python -m tests.benchmarks $(ONLY)

soak: $(if $(ROWS),$(VENV)/.dev $(GENERATED),test-whole)  ## what both services promise, against its figures: ROWS=1,5 MINUTES=10 STATE=.soak.json; SEED=7 replays
	$(BIN)/python -m tests.soak --rows "$(ROWS)" --minutes $(or $(MINUTES),10) --state $(or $(STATE),.soak.json) \
	    $(if $(SEED),--seed $(SEED))

# On a host that can reach nothing, with the bundle beside the checkout: its own Python, torch and triton, and our wheels.
GPU_FLAGS = $(if $(DRY),--dry) $(if $(PARTS),--parts $(PARTS)) $(if $(RESULTS),--results $(RESULTS))

gpu-check:  ## prove it on this machine's CUDA device; DRY=1 rehearses without one, PARTS=ab runs some, RESULTS=DIR takes the files
ifneq ($(wildcard $(BUNDLE)/*.whl),)
	rm -rf $(BUNDLE)/site && $(PYTHON) tests/gpu/bundle.py install $(BUNDLE) $(BUNDLE)/site
	PYTHONPATH=$(CURDIR)/$(BUNDLE)/site $(PYTHON) -m tests.gpu $(GPU_FLAGS)
else
	$(MAKE) $(VENV)/.dev $(GENERATED)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[cuda]'
	$(BIN)/python -m tests.gpu $(GPU_FLAGS)
endif

vllm-check: $(VENV)/.run  ## real vLLM processes with the connector, in an environment of their own (about 2 GB)
	$(BIN)/python -m tests.vllm_check

model-check: $(VENV)/.dev $(GENERATED)  ## SmolLM2-135M-Instruct, which is fetched, held to transformers
	$(BIN)/python -m tests.model_check

gpu-bundle: $(VENV)/.dev $(GENERATED)  ## what a GPU host that can reach nothing needs for gpu-check, for Python BUNDLE_PYTHON (3.12)
	$(BIN)/python -m tests.gpu.bundle $(BUNDLE) $(BUNDLE_PYTHON)

clean:  ## remove what was built
	rm -rf $(VENV) .venv-core $(BUNDLE) build dist *.egg-info clients/node/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find protos -name '*_pb2*' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

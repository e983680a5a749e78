# `make run` and `make test` do all the set-up on a fresh machine; a second time it costs nothing.

PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	2>/dev/null && echo $$python && break; done)
FLAVOUR ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(FLAVOUR)
CONFIG ?= examples/feed.yaml

.PHONY: run test lint format bench install clean image image-gpu image-mlflow image-check lock

run: $(INSTALLED)  ## Simulated feed, all five stages through Kubeflow's local runner, to MLflow
	$(BIN)/thawline run --config $(CONFIG) --runner kubeflow

test: $(INSTALLED)  ## Every test, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile

lint: $(INSTALLED)  ## Format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## Every benchmark that needs no GPU
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

install: $(INSTALLED)

# TorchRec asks for FBGEMM's CUDA build, which cannot load without CUDA and, installed beside the
# CPU build, overwrites it. On a CPU TorchRec is therefore installed without its dependencies,
# after the `cpu` extra has brought them.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with venv is needed; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(FLAVOUR),dev]'
	test $(FLAVOUR) = gpu || $(BIN)/python -m pip install --quiet --no-deps torchrec==1.8.0
	rm -f $(VENV)/.installed-*
	touch $@

# Wheels in this folder come before the index's, as pip's own PIP_FIND_LINKS has it.
WHEELS ?= $(wildcard $(PIP_FIND_LINKS))
IMAGES = $(PYTHON) docker/images.py $(if $(SSL_CERT_FILE),--certificates $(SSL_CERT_FILE))
CPU_WHEELS = $(if $(WHEELS),--wheels $(WHEELS))

image:  ## The CPU image, by docker or buildah, whichever is there
	$(IMAGES) build cpu $(CPU_WHEELS)

image-gpu:  ## The GPU image, likewise
	$(IMAGES) build gpu

image-mlflow:  ## The image of the MLflow server in k8s/
	$(IMAGES) build mlflow

image-check:  ## Builds the CPU image by buildah and runs every stage in it; needs root
	$(IMAGES) check cpu $(CPU_WHEELS)

# The images' packages with their hashes. CPU builds of torch come from PyTorch's own index, which
# uv knows, or from WHEELS. The extra `gpu` names TorchRec; exclude-cpu.txt drops FBGEMM's CUDA build.
lock: $(patsubst %,docker/requirements-%.txt,build cpu gpu mlflow)

LOCK = UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --generate-hashes \
	--constraint constraints.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--no-annotate --no-emit-index-url --no-emit-find-links --output-file $@
docker/requirements-build.txt: docker/requirements-build.in constraints.txt | $(INSTALLED)
	$(LOCK) $<
docker/requirements-mlflow.txt: docker/requirements-mlflow.in constraints.txt | $(INSTALLED)
	$(LOCK) $<
docker/requirements-cpu.txt: pyproject.toml constraints.txt docker/exclude-cpu.txt | $(INSTALLED)
	$(LOCK) $(if $(WHEELS),--find-links $(WHEELS),--torch-backend cpu) \
		--extra cpu --extra gpu --extra kubeflow --excludes docker/exclude-cpu.txt $<
docker/requirements-gpu.txt: pyproject.toml constraints.txt | $(INSTALLED)
	$(LOCK) --extra gpu --extra kubeflow $<

clean:  ## Removes the environment and the runs
	rm -rf $(VENV) runs

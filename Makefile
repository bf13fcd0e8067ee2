# make demo   the main job: environment, synthetic data, training, evaluation, table and pictures
# make test   the tests
# make help   all targets
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
NP ?= 2
DEMO ?= runs/demo
DATA ?= data/synthetic-nuscenes
REDO ?=
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help install demo test lint gpu-test clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install:  ## make .venv with pinned packages and the compiled ops (second run: seconds)
	@$(PYTHON) tools/install.py --venv $(VENV) $(if $(REDO),--redo $(REDO))

demo: install  ## generate data, train the multitask model on NP processes, evaluate, draw
	@$(BIN)/python tools/demo.py --processes $(NP) --run-dir $(DEMO) --data $(DATA)

test: install  ## run the tests (TESTS=tests/ops for a part)
	@$(BIN)/python -m pytest $(or $(TESTS),tests) -q

gpu-test: install  ## run the tests that need a GPU
	@$(BIN)/python -m pytest $(or $(TESTS),tests) -q -m gpu

lint: install  ## check the style
	@$(BIN)/ruff check .

clean:  ## remove the environment and build results (data and runs stay)
	rm -rf $(VENV) build *.egg-info mmdet3d_ext/*.so

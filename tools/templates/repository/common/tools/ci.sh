#!/bin/sh
# Every test on a machine without a GPU: PyTorch's path, then the kernels in Triton's interpreter.
set -e
cd "$(dirname "$0")/.."
export CUDA_VISIBLE_DEVICES=
python -m pytest -q
TRITON_INTERPRET=1 python -m pytest -q

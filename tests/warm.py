"""What ranks need, imported once by the server that forks them (ranks.py). It must start no thread: a forked process
has only the one that forked it."""

from __future__ import annotations

import gc
import threading

import torch

from workers.pretrained import hide_broken_media_packages

hide_broken_media_packages()
torch.set_num_threads(1)

import pytest  # noqa: E402, F401
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: E402, F401

import tests.weights_support  # noqa: E402, F401
import workers.trainer  # noqa: E402, F401

assert threading.active_count() == 1
gc.collect()
gc.freeze()  # or the first collection in each rank would copy all these pages

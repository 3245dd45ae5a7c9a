"""A model spread over processes by tensor parallelism: torchrun --nproc-per-node 2 examples/sharded.py MODEL TEXT."""

import sys

import torch.distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

import regard

path, text = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto")
subject = regard.causal(model, AutoTokenizer.from_pretrained(path))
why = regard.explain(subject, text, method="grad_rollout")  # every process makes the same calls, and gets the same
if torch.distributed.get_rank() == 0:
    print(why.words().to_string())

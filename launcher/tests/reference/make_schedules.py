#!/usr/bin/env python3
"""The learning rates of DeepSpeed's schedules, of which src/rate/tests.rs has what this prints: `make_schedules.py`, with
deepspeed 0.19.8 and any torch. Each line has the rates with which the first 12 optimizer steps are made: the schedule is put
forward after each step, as DeepSpeed's engine does."""

import torch
from deepspeed.runtime import lr_schedules

LR = 0.02
STEPS = 12
CASES = [
    ("WarmupLR", dict(warmup_min_lr=0.001, warmup_max_lr=0.01, warmup_num_steps=5)),
    ("WarmupLR", dict(warmup_num_steps=1)),
    ("WarmupDecayLR", dict(total_num_steps=10, warmup_min_lr=0.001, warmup_max_lr=0.01, warmup_num_steps=4)),
    ("WarmupDecayLR", dict(total_num_steps=3, warmup_num_steps=6)),
    ("WarmupCosineLR", dict(total_num_steps=10, warmup_min_ratio=0.1, cos_min_ratio=0.05, warmup_num_steps=4)),
    ("WarmupCosineLR", dict(total_num_steps=100, warmup_num_steps=3)),
]

for name, params in CASES:
    for warmup_type in ("linear", "log"):
        weights = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weights], lr=LR)
        schedule = getattr(lr_schedules, name)(optimizer, warmup_type=warmup_type, **params)
        rates = []
        for _ in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
        print(name, warmup_type, params)
        print("   ", ", ".join(map(repr, rates)))

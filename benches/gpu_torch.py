#!/usr/bin/env python3
"""The peer of training on one GPU: the same Llama in plain PyTorch with torch.compile, scaled dot product
attention and fused AdamW. By default weights are f32 and products bf16 by autocast, which is what people write; with
`--weights bf16` weights and moments are bf16, which is less work and less precise than ours, and faster in PyTorch
than the other. Prints the median step, tokens/s, and MFU by the same count of FLOPs.
"""
import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

PRESETS = {
    "llama-3.2-1b": dict(hidden=2048, layers=16, heads=32, kv=8, width=64, ffn=8192, vocab=128256, tied=True),
    "32m": dict(hidden=512, layers=8, heads=8, kv=4, width=64, ffn=1376, vocab=8192, tied=False),
    "nano": dict(hidden=64, layers=2, heads=4, kv=2, width=16, ffn=176, vocab=256, tied=False),
}


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(c["hidden"], 1e-5), nn.RMSNorm(c["hidden"], 1e-5)
        self.q, self.k = linear(c["hidden"], c["heads"] * c["width"]), linear(c["hidden"], c["kv"] * c["width"])
        self.v, self.o = linear(c["hidden"], c["kv"] * c["width"]), linear(c["heads"] * c["width"], c["hidden"])
        self.gate, self.up = linear(c["hidden"], c["ffn"]), linear(c["hidden"], c["ffn"])
        self.down = linear(c["ffn"], c["hidden"])

    def forward(self, x, cos, sin):
        n, t, _ = x.shape
        heads = lambda y, h: y.view(n, t, h, self.c["width"]).transpose(1, 2)
        y = self.norm1(x)
        q, k, v = heads(self.q(y), self.c["heads"]), heads(self.k(y), self.c["kv"]), heads(self.v(y), self.c["kv"])
        q, k = rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, c, length):
        super().__init__()
        self.embed = nn.Embedding(c["vocab"], c["hidden"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.norm, self.head = nn.RMSNorm(c["hidden"], 1e-5), nn.Linear(c["hidden"], c["vocab"], bias=False)
        if c["tied"]:
            self.head.weight = self.embed.weight
        angles = torch.outer(torch.arange(length), 5e5 ** (-torch.arange(0, c["width"], 2) / c["width"]))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(lambda m: hasattr(m, "weight") and m.weight.dim() == 2 and nn.init.normal_(m.weight, std=0.02))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", default="llama-3.2-1b", choices=PRESETS)
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--weights", default="f32", choices=["f32", "bf16"])
    p.add_argument("--device", default="cuda")
    p.add_argument("--peak", type=float, help="FLOP/s that the GPU promises, of which MFU is a part")
    p.add_argument("--eager", action="store_true", help="without torch.compile")
    a = p.parse_args()
    c = PRESETS[a.model]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if a.weights == "bf16" else torch.float32
    with torch.device(a.device):
        model = Llama(c, a.length).to(dtype)
    parameters = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=a.device == "cuda")
    # As our `--data random`: new ones in each step, since what was learned by heart takes less power, and so less time.
    batch = lambda: torch.randint(c["vocab"], (a.rows, a.length + 1), device=a.device)
    run = model if a.eager else torch.compile(model)
    sync = torch.cuda.synchronize if a.device == "cuda" else lambda: None
    times = []
    for step in range(a.steps):
        sync()
        start = time.perf_counter()
        data = batch()
        tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        with torch.autocast(a.device, torch.bfloat16, enabled=a.weights == "f32"):
            loss = run(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync()
        times.append(time.perf_counter() - start)
    seconds = sorted(times[min(5, len(times) - 1) :])[(len(times) - min(5, len(times) - 1)) // 2]
    flops = (6 * parameters + 12 * c["layers"] * c["heads"] * c["width"] * a.length) * a.rows * a.length / seconds
    mfu = f", MFU {100 * flops / a.peak:.1f}%" if a.peak else ""
    print(
        f"PyTorch {torch.__version__}, weights {a.weights}, {'eager' if a.eager else 'compiled'}: {parameters} parameters, "
        f"{a.rows} x {a.length} tokens, median {seconds * 1e3:.1f} ms: {a.rows * a.length / seconds:.0f} tokens/s, "
        f"{flops / 1e12:.0f} TFLOP/s{mfu}, loss {loss.item():.4f}"
    )


if __name__ == "__main__":
    main()

"""Makes the reference data of this folder with PyTorch and transformers: see README.md for its layout.

Run from anywhere with torch, transformers and safetensors installed: python make_reference.py
"""

import copy
import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
BATCHES, ROWS, LENGTH, STEPS = 3, 2, 24, 10
OPTIMIZER = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
CLIP = 1.0

BASE = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=12, vocab_size=61, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
    use_cache=False,
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
# Odd sizes on purpose: nothing may depend on multiples of a vector's width.
VARIANTS = {
    "gqa": dict(),
    "mha": dict(num_key_value_heads=4, head_dim=16, num_hidden_layers=3, hidden_size=40, intermediate_size=52),
    "tied": dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0)),
    "linear": dict(num_key_value_heads=1, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama3": dict(num_attention_heads=3, num_key_value_heads=1, head_dim=32, rope_parameters=LLAMA3),
    "padded": dict(pad_token_id=3, num_hidden_layers=1),
}


def build(name, seed):
    """A model whose weights are bf16 numbers, so that the f32 and the bf16 run start from the same."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **VARIANTS[name]}))
    with torch.no_grad():
        for p in model.parameters():
            # Activations of order one, so that attention and gates are far from linear.
            p.copy_(torch.randn_like(p) * p.shape[1] ** -0.5 if p.dim() == 2 else 1 + 0.2 * torch.randn_like(p))
            p.copy_(p.bfloat16().float())
        if VARIANTS[name].get("tie_word_embeddings"):
            model.tie_weights()
    return model


def run(model, tokens):
    """Logits and mean loss of tokens (rows, length + 1)."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return logits, cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model, tokens):
    model.zero_grad()
    logits, loss = run(model, tokens)
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def cast(model, dtype):
    """A copy with its parameters as dtype. Module.to would also round the rotary frequencies."""
    model = copy.deepcopy(model)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def trace(model, tokens, dtype):
    """AdamW on f32 master weights; `dtype` is what forward and backward compute in. Decay only on matrices.

    Step s takes batch s modulo the batches, so that the loss falls as they are learnt.
    """
    work = cast(model, dtype)
    names = [n for n, _ in model.named_parameters()]
    master = {n: p.detach().clone() for n, p in model.named_parameters()}
    groups = [
        dict(params=[master[n] for n in names if master[n].dim() == 2]),
        dict(params=[master[n] for n in names if master[n].dim() != 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, **OPTIMIZER)
    losses, norms = [], []
    for step in range(STEPS):
        with torch.no_grad():
            for n, p in work.named_parameters():
                p.copy_(master[n])
        _, loss, grads = gradients(work, tokens[step % BATCHES])
        for n in names:
            master[n].grad = grads[n].float()
        norms.append(torch.nn.utils.clip_grad_norm_(list(master.values()), CLIP).double())
        losses.append(loss.double())
        optimizer.step()
    return torch.stack(losses), torch.stack(norms), master


def ways(model):
    """Sets the ways in which PyTorch computes the same, one after the other. They round at different places."""
    for attention in ("eager", "sdpa"):
        for onednn in (True, False):
            model.set_attn_implementation(attention)
            with torch.backends.mkldnn.flags(enabled=onednn):
                yield


def make(name, seed):
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    model = build(name, seed)
    tokens = torch.randint(0, model.config.vocab_size, (BATCHES, ROWS, LENGTH + 1))
    if model.config.pad_token_id is not None:
        tokens[..., ::5] = model.config.pad_token_id
    data = {"tokens": tokens.int()}

    logits, loss, grads = gradients(model, tokens[0])
    data |= {"f32.logits": logits, "f32.loss": loss.double()}
    data |= {f"f32.grad.{n}": g for n, g in grads.items()}
    data["f32.trace.loss"], data["f32.trace.norm"], final = trace(model, tokens, torch.float32)
    if name in ("gqa", "tied"):
        data |= {f"f32.final.{n}": w.detach() for n, w in final.items()}

    losses, norms = zip(*(trace(model, tokens, torch.bfloat16)[:2] for _ in ways(model)))
    data["bf16.trace.loss"], data["bf16.trace.norm"] = torch.stack(losses), torch.stack(norms)
    # Two are saved in f32, one of them in several files; the others in bf16, which loses nothing here.
    if name == "tied":
        model.save_pretrained(out, max_shard_size="60KB")
    elif name == "gqa":
        model.save_pretrained(out)
    half = cast(model, torch.bfloat16)
    if name not in ("tied", "gqa"):
        half.save_pretrained(out)
    logits, loss, grads = gradients(half, tokens[0])
    data |= {"bf16.logits": logits, "bf16.loss": loss.double()}
    data |= {f"bf16.grad.{n}": g for n, g in grads.items()}

    optimizer = {k: str(v) for k, v in OPTIMIZER.items() if k != "betas"}
    betas = dict(zip(("beta1", "beta2"), map(str, OPTIMIZER["betas"])))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    metadata = optimizer | betas | {"clip": str(CLIP)} | versions
    save_file({k: v.contiguous() for k, v in data.items()}, out / "reference.safetensors", metadata)
    (out / "generation_config.json").unlink(missing_ok=True)
    print(json.dumps({"variant": name, "loss": data["f32.trace.loss"].tolist()}))


def make_angles():
    """Cosines and sines of rotary embedding, far beyond the positions that the models here see."""
    positions = torch.tensor([0, 1, 2, 63, 1000, 8191, 32767, 100_000, 131_071])
    scalings = {"plain": dict(rope_type="default"), "linear": dict(rope_type="linear", factor=2.5), "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)}
    data = {"positions": positions.int()}
    for name, scaling in scalings.items():
        config = LlamaConfig(**{**BASE, "head_dim": 128, "rope_parameters": dict(rope_theta=5e5, **scaling)})
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
        data[name] = torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=1)
    save_file(data, HERE / "angles.safetensors", {"torch": torch.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_angles()
    for seed, variant in enumerate(VARIANTS):
        make(variant, seed)

"""Loads a directory that `caravan train --save` wrote with transformers, and compares its tokens with those of its
tokenizer.json alone, or with bytes, and its loss on a text with caravan's.

python load_saved.py MODEL_DIR TEXT_FILE LOSS
Exit status 0: equal; 1: not; 77: torch or transformers cannot be imported.
"""

import json
import pathlib
import sys

try:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
except ImportError as error:
    print(error)
    sys.exit(77)

torch.set_num_threads(1)
directory, text, expected = sys.argv[1], pathlib.Path(sys.argv[2]).read_text(), float(sys.argv[3])
model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, local_files_only=True)
assert type(model) is LlamaForCausalLM, type(model)
problems = {k: v for k, v in info.items() if v}
assert not problems, problems
tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
of_bytes = json.loads(pathlib.Path(directory, "config.json").read_text()).get("caravan_tokenizer") == "bytes"
alone = Tokenizer.from_file(str(pathlib.Path(directory, "tokenizer.json")))
# All characters of up to three bytes, and some of four; spaces that a clean-up would take away.
every = " a , b .\n\n" + "".join(chr(c) for c in range(0x1F000, 0x20000)) + "\U0010ffff"
every += "".join(chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000)
for sample in (text, every):
    tokens = tokenizer(sample)["input_ids"]
    assert tokens == (list(sample.encode()) if of_bytes else alone.encode(sample).ids), tokens[:100]
    assert not of_bytes or tokenizer.decode(tokens) == sample
for ids in (model.config, model.generation_config):
    named = (ids.bos_token_id, ids.eos_token_id)
    assert named == (tokenizer.bos_token_id, tokenizer.eos_token_id), named
tokens = tokenizer(text)["input_ids"]
tokens = torch.tensor([tokens])
with torch.no_grad():
    logits = model.float()(input_ids=tokens[:, :-1]).logits
loss = torch.nn.functional.cross_entropy(logits[0].double(), tokens[0, 1:]).item()
print(f"{directory}: loss {loss} here, {expected} of caravan eval")
# A NaN is no equal.
sys.exit(0 if abs(loss - expected) < 1e-5 else 1)

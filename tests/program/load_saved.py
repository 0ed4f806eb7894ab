"""Loads a directory that `caravan train --save` wrote with transformers, and compares its loss on a text with caravan's.

python load_saved.py MODEL_DIR TEXT_FILE LOSS
Exit status 0: equal; 1: not; 77: torch or transformers cannot be imported.
"""

import pathlib
import sys

try:
    import torch
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
if pathlib.Path(directory, "tokenizer.json").exists():
    tokens = AutoTokenizer.from_pretrained(directory, local_files_only=True)(text)["input_ids"]
else:
    tokens = list(text.encode())
tokens = torch.tensor([tokens])
with torch.no_grad():
    logits = model.float()(input_ids=tokens[:, :-1]).logits
loss = torch.nn.functional.cross_entropy(logits[0].double(), tokens[0, 1:]).item()
print(f"{directory}: loss {loss} here, {expected} of caravan eval")
# A NaN is no equal.
sys.exit(0 if abs(loss - expected) < 1e-5 else 1)

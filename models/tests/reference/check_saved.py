"""Loads directories that we saved with transformers and compares their logits with the reference data.

python check_saved.py MODEL_DIR REFERENCE.safetensors [MODEL_DIR REFERENCE.safetensors ...]
Exit status 0: equal; 1: not; 77: torch or transformers cannot be imported.
"""

import sys

try:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
except ImportError as error:
    print(error)
    sys.exit(77)

torch.set_num_threads(1)
worst = 0.0
for model_dir, reference in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    model, info = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True, local_files_only=True)
    assert type(model) is LlamaForCausalLM, type(model)
    problems = {k: v for k, v in info.items() if v}
    assert not problems, problems
    data = load_file(reference)
    with torch.no_grad():
        logits = model.float()(input_ids=data["tokens"][0, :, :-1].long()).logits
    expected = data["f32.logits"]
    distance = ((logits - expected).norm() / expected.norm()).item()
    print(f"{model_dir}: relative distance of logits {distance:.2e}")
    # Not max(), which loses a NaN.
    worst = worst if distance <= worst else distance
sys.exit(0 if worst < 1e-6 else 1)

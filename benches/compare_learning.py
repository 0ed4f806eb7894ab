#!/usr/bin/env python3
"""Learning side by side with transformers: the baby Llama on one text, loss on held-out text and time to train.

    benches/compare_learning.py --python V/bin/python --peer path/to/train_baby.py --data tinyshakespeare.txt

The peer is not in this repository. It runs in its own folder without arguments, reads the same text there as bytes, trains the
same model for 2000 steps of 12 x 64 tokens with two threads (torch.set_num_threads(2)), and prints `train s SECONDS` and
`val LOSS`, the loss on the last tenth of the text.
Ours takes the same steps with 2 ranks of one thread and 6 sequences each, in f32 also with --matmul-precision high, which the
peer does not use and no target asks for.
"""

import pathlib
import re
import statistics
import sys
import tempfile

import side_by_side as sbs

FLAGS = """--model baby --tokenizer bytes --ranks 2 --threads 1 --micro-batch 6 --seq 64 --steps 2000 --lr 1e-3
           --min-lr 1e-4 --schedule cosine --warmup 100 --beta1 0.9 --beta2 0.99 --weight-decay 0.1 --clip 1
           --val-fraction 0.1 --eval-every 0 --sample 0""".split()
# What the validation loss is to come to.
LOSS = 1.70


# What is trained, by its flags.
OURS = {"f32": ["--dtype", "f32"], "f32 high": ["--dtype", "f32", "--matmul-precision", "high"],
        "bf16": ["--dtype", "bf16"]}


def ours(program, data, dtype, stage, seed):
    run, _, summary = sbs.caravan(program, [*FLAGS, "--data", data, *OURS[dtype], "--stage", stage, "--seed", seed])
    evaluation = max(rank["evaluation_seconds"] for rank in summary["ranks"])
    return {"engine": "caravan", "dtype": dtype, "stage": run["stage"], "seed": run["seed"],
            "val": summary["validation_loss"], "train_s": round(summary["seconds"] - evaluation, 2)}


def peer(python, script):
    script = pathlib.Path(script).resolve()
    out = sbs.run([python, script.name], cwd=script.parent)
    found = [re.search(word + r" ([0-9.]+)", out) for word in ("train s", "val")]
    if not all(found):
        sys.exit(f"{script.name} printed no 'train s SECONDS' and 'val LOSS', but:\n{out[-4000:]}")
    seconds, loss = (float(each.group(1)) for each in found)
    return {"engine": "transformers", "dtype": "f32", "val": loss, "train_s": round(seconds, 2)}


def main():
    parser = sbs.parser(__doc__, 2)
    parser.add_argument("--python", required=True, help="Python of the environment with the peer")
    parser.add_argument("--peer", required=True, help="the peer's script")
    parser.add_argument("--data", required=True, help="the text, the same that the peer reads")
    parser.add_argument("--stage", type=int, default=3)
    args = sbs.parse(parser)
    sbs.need_files(args.peer, args.data)
    python = sbs.path_of(args.python)
    rows = sbs.Record("learning", before=sbs.given({"--caravan": args.caravan}))
    versions = sbs.versions(python)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        program = sbs.keep(folder, caravan=args.caravan).get("caravan") or sbs.build(folder)
        for round_ in range(args.rounds):
            for dtype in OURS:
                rows.add({"round": round_, **ours(program, args.data, dtype, args.stage, 1337 + round_)})
                print(sbs.stamp(), rows[-1], flush=True)
            rows.add({"round": round_, **peer(python, args.peer)})
            print(sbs.stamp(), rows[-1], flush=True)

    def middle(engine, dtype, key):
        return statistics.median([row[key] for row in rows if (row["engine"], row["dtype"]) == (engine, dtype)])

    theirs = middle("transformers", "f32", "train_s")
    cells = [[f"{engine} {dtype}", f"{middle(engine, dtype, 'val'):.4f}", f"{middle(engine, dtype, 'train_s'):.1f}",
              f"{middle(engine, dtype, 'train_s') / theirs:.2f}"]
             for engine, dtype in [*(("caravan", dtype) for dtype in OURS), ("transformers", "f32")]]
    targets = []
    for dtype in ("f32", "bf16"):
        loss, time = middle("caravan", dtype, "val"), middle("caravan", dtype, "train_s") / theirs
        targets += [[f"{dtype}: validation loss at most {LOSS:.2f}", f"{loss:.4f}", sbs.holds(loss <= LOSS)],
                    [f"{dtype}: at most half of transformers' time", f"{time:.2f}", sbs.holds(time <= 0.5)]]
    text = "\n".join(["# Learning beside transformers", "",
                      "The baby Llama (4 layers, hidden 128, 4 heads, FFN 344, context 64) on bytes, 2000 steps of "
                      "12 x 64 tokens, AdamW, cosine from 1e-3 to 1e-4 after 100 steps of warm-up; loss on the last "
                      "tenth of the text, evaluated whole. Both have two threads: ours are 2 ranks of one, ZeRO stage "
                      f"{args.stage}. Medians over {args.rounds} rounds (each of ours with another seed).", "",
                      "## Targets", "", sbs.table(["target", "found", "holds"], targets), "",
                      sbs.table(["", "validation loss", "seconds to train", "x transformers"], cells), ""])
    command = ("benches/compare_learning.py --python V/bin/python --peer train_baby.py --data tinyshakespeare.txt "
               f"--rounds {args.rounds} --stage {args.stage}")
    rows.write(text, command, {"peer": versions})


if __name__ == "__main__":
    sbs.command(main)

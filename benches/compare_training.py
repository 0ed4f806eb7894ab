#!/usr/bin/env python3
"""Training speed side by side with PyTorch DDP, FSDP2 and DeepSpeed over gloo, on one machine.

Runs ours at every stage and the peers in turn, several rounds, on the same model, batch and number of ranks, and
writes medians, ratios and every raw row to benches/results.

    benches/compare_training.py --python V/bin/python --peer path/to/train_torch.py --rounds 3

V is a virtual environment with torch, transformers, accelerate and deepspeed. The peer script is not in this repository:
torchrun starts it on two ranks of one thread each with --engine (ddp, fsdp2, deepspeed), --stage (0 to 3), --dtype (bf16,
f32) and --steps. It trains a Llama of the shape of our 32m, 4 sequences of 256 tokens a rank and step, and rank 0 prints a
line with one JSON object: engine, stage, dtype, step_s (the median step without the first two, of an even number the slower
one of the two in the middle), tok_s (tokens a second of all ranks in such a step) and rss_mb (peak resident memory). Of ours
the step is the same: the median without the first two. In f32 ours is measured also with --matmul-precision high, which is no
peer's default and decides no target, and each is also set beside what the processor's multiply-adds allow, which fma_limit.c
measures (it takes a C compiler).
"""

import contextlib
import json
import pathlib
import shlex
import statistics
import sys
import tempfile

import side_by_side as sbs

PEERS = [("ddp", 0), ("fsdp2", 2), ("fsdp2", 3), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2),
         ("deepspeed", 3)]
ATTEMPTS = 3
# How many times faster than the fastest peer ours is to be.
FASTER = {"bf16": 1.3, "f32": 1.8}
RANKS = 2
# What a token costs in products, forward and backward: 6 a parameter but for the embedding, which is only looked up,
# and causal attention.
HIDDEN, LAYERS, VOCABULARY, LENGTH, PARAMETERS = 512, 8, 8192, 256, 31_597_056
FLOPS = 6 * (PARAMETERS - VOCABULARY * HIDDEN) + 6 * LAYERS * HIDDEN * LENGTH


# Ours as it is by default, and in f32 also with products that may lose bits of their inputs.
OURS = {"bf16": {"caravan": ""}, "f32": {"caravan": "", "caravan high": "--matmul-precision high"}}


def ours(launch, program, dtype, engine, stage, steps):
    flags = f"""--model 32m --data random --ranks {RANKS} --threads 1 --micro-batch 4 --seq {LENGTH} --steps {steps}
                --stage {stage} --dtype {dtype} --lr 3e-4 --clip 1 --sample 0 --val-fraction 0 {OURS[dtype][engine]}""".split()
    _, lines, summary = sbs.caravan(program, flags, launch)
    # Without the first two, as the peer does; a mean of two in the middle would be faster than what it counts.
    seconds = statistics.median_high(line["seconds"] for line in lines[2:])
    rss = max(rank["peak_rss_bytes"] or 0 for rank in summary["ranks"]) / 2**20
    exposed = statistics.median_high(line["exposed_communication_seconds"] for line in lines[2:])
    return {"engine": engine, "stage": stage, "dtype": dtype, "step_s": round(seconds, 4),
            "tok_s": round(lines[0]["tokens"] / seconds, 1), "rss_mb": round(rss), "exposed_s": round(exposed, 4)}


def said(out, asked):
    """The peer's row in what it printed, if it is of what was asked for."""
    for line in out.splitlines():
        with contextlib.suppress(json.JSONDecodeError, KeyError):
            if line.startswith("{"):
                found = json.loads(line)
                row = {key: found[key] for key in ("engine", "stage", "dtype", "step_s", "tok_s", "rss_mb")}
                if (row["engine"], row["stage"], row["dtype"]) == asked:
                    return row
    return None


def peer(launch, args, dtype, engine, stage):
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*launch, args.torchrun, "--nproc-per-node", RANKS, args.peer, "--engine", engine, "--stage", stage, "--dtype",
               dtype, "--steps", args.steps]
    # DeepSpeed's gloo aborts now and then: such a run is repeated, and the row says how often.
    for failed in range(ATTEMPTS):
        out, failure = sbs.attempt(command, env=env)
        row = said(out, (engine, stage, dtype))
        if row and not failure:
            return {**row, "failed_before": failed} if failed else row
        print(sbs.stamp(), failure or f"it printed no row of {engine} stage {stage} in {dtype}, but:\n{out[-4000:]}", flush=True)
    sys.exit(f"{engine} stage {stage} in {dtype} failed {ATTEMPTS} times")


def limit(launch):
    """Tokens/s at which the ranks' processors would do nothing but f32 multiply-adds, on registers."""
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "fma_limit"
        source = pathlib.Path(__file__).parent / "fma_limit.c"
        sbs.run(["cc", "-O3", "-march=native", "-ffp-contract=fast", "-o", program, source])
        return RANKS * float(sbs.run([*launch, program, RANKS])) / FLOPS


def main():
    parser = sbs.parser(__doc__, 3)
    parser.add_argument("--python", required=True, help="Python of the environment with the peers")
    parser.add_argument("--peer", required=True, help="the peer's script")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", nargs="+", choices=[*FASTER], default=[*FASTER])
    args = sbs.parse(parser)
    if args.steps < 3:
        parser.error("--steps has to be at least 3: the first two are not counted")
    sbs.need_files(args.peer)
    python = sbs.path_of(args.python)
    args.torchrun = pathlib.Path(python).parent / "torchrun"
    # The limit is one of f32.
    sbs.need(*["cc"] * ("f32" in args.dtype), "taskset", args.torchrun)
    cpus = sbs.cpus(RANKS)
    # All are measured on the same ones, of which ours and the limit give each rank its own.
    launch = sbs.on(*cpus)
    rows = sbs.Record("training", before=sbs.given({"--caravan": args.caravan}))
    versions = sbs.versions(python)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        program = sbs.keep(folder, caravan=args.caravan).get("caravan") or sbs.build(folder)
        for round_ in range(args.rounds):
            for dtype in args.dtype:
                if dtype == "f32":
                    most = round(limit(launch), 1)
                    rows.add({"round": round_, "engine": "limit", "stage": 0, "dtype": dtype, "tok_s": most})
                    print(sbs.stamp(), rows[-1], flush=True)
                # Alternating, so that a change of the machine's mood meets both sides.
                for position in range(max(4, len(PEERS))):
                    for engine in OURS[dtype] if position < 4 else ():
                        rows.add({"round": round_, **ours(launch, program, dtype, engine, position, args.steps)})
                        print(sbs.stamp(), rows[-1], flush=True)
                    if position < len(PEERS):
                        rows.add({"round": round_, **peer(launch, args, dtype, *PEERS[position])})
                        print(sbs.stamp(), rows[-1], flush=True)
    parts = ["# Training speed beside PyTorch and DeepSpeed", "",
             "31.6 M parameters (hidden 512, 8 layers, 8 heads, 4 KV heads, FFN 1376, vocabulary 8192, untied), "
             "2 ranks x 1 thread, micro-batch 4, sequence 256. Medians over rounds of each run's median step; "
             "resident memory is the larger rank's peak (the peer reports rank 0's). By round: of single rounds the "
             "ratio to that peer which is the fastest by medians.", ""]
    summary, targets = parts, []
    parts = []
    for dtype in args.dtype:
        def middle(engine, stage, key):
            found = [row[key] for row in rows if (row["engine"], row["stage"], row["dtype"]) == (engine, stage, dtype)]
            return statistics.median(found)

        def by_round(above, below):
            """Of two (engine, stage): their ratios in single rounds. Few that differ have no middle that says much."""
            of = [{row["round"]: row["tok_s"] for row in rows if (row["engine"], row["stage"], row["dtype"]) == (*each, dtype)}
                  for each in (above, below)]
            return " ".join(f"{of[0][r] / of[1][r]:.2f}" for r in of[0])

        def same_stage(stage):
            return max(middle(*p, "tok_s") for p in PEERS if p[1] == stage)

        best = max(PEERS, key=lambda p: middle(*p, "tok_s"))
        fastest, leanest = middle(*best, "tok_s"), min(middle(*p, "rss_mb") for p in PEERS)
        named = [(f"{engine} stage {stage}" if engine != "ddp" else "DDP", engine, stage) for engine, stage in
                 [(engine, s) for engine in OURS[dtype] for s in range(4)] + PEERS]
        header = ["", "tokens/s", "x fastest peer", "by round", "x fastest peer of the stage", "peak MB", "x leanest peer"]
        cells = [[name, f"{middle(e, s, 'tok_s'):.0f}", f"{middle(e, s, 'tok_s') / fastest:.2f}",
                  by_round((e, s), best), f"{middle(e, s, 'tok_s') / same_stage(s):.2f}", f"{middle(e, s, 'rss_mb'):.0f}",
                  f"{middle(e, s, 'rss_mb') / leanest:.2f}"]
                 for name, e, s in named]
        stages = [(middle("caravan", s, "tok_s") / fastest, middle("caravan", s, "rss_mb") / leanest, s) for s in range(4)]
        (speed, _, slowest), (_, held, largest) = min(stages), max(stages, key=lambda of: of[1])
        targets += [[f"{dtype}: at least {FASTER[dtype]} times the fastest peer at every stage",
                     f"{speed:.2f} at stage {slowest}", by_round(("caravan", slowest), best), sbs.holds(speed >= FASTER[dtype])],
                    [f"{dtype}: a rank's peak memory below half of the leanest peer's at every stage",
                     f"{held:.2f} at stage {largest}", "", sbs.holds(held < 0.5)]]
        text = f"The fastest peer is {best[0]} at stage {best[1]}; the leanest holds {leanest:.0f} MB."
        if dtype == "f32":
            most = middle("limit", 0, "tok_s")
            header.append("x limit")
            for cell, (_, e, s) in zip(cells, named):
                cell.append(f"{middle(e, s, 'tok_s') / most:.2f}")
            text += (f" The limit is {most:.0f} tokens/s, {most / fastest:.2f} times the fastest peer: the products' "
                     f"{FLOPS / 1e6:.0f} MFLOP a token at the rate of multiply-adds on registers (where there is AMX, "
                     "ours makes them of bf16 instead).")
        parts += [f"## {dtype}", text, "", sbs.table(header, cells), ""]
    parts = [*summary, "## Targets", "", sbs.table(["target", "worst found", "by round", "holds"], targets), "", *parts]
    failed = [f"{row['engine']} stage {row['stage']} in {row['dtype']} ({row['failed_before']})" for row in rows
              if "failed_before" in row]
    if failed:
        parts += [f"Runs of peers that ended with an error and were repeated: {', '.join(failed)}.", ""]
    command = " ".join(["benches/compare_training.py --python V/bin/python --peer train_torch.py",
                        f"--rounds {args.rounds} --steps {args.steps} --dtype {shlex.join(args.dtype)}"])
    rows.write("\n".join(parts), command, {"processors of the ranks": " and ".join(map(str, cpus)), "peers": versions})


if __name__ == "__main__":
    sbs.command(main)

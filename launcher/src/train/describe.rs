//! A training run in words: for other ranks, for people, and for the metrics file.

use crate::about::{about, now};
use crate::agree::Signature;
use crate::args::deepspeed;
use crate::checkpoint::Checkpoints;
use crate::device::Device;
use crate::doctor::cuda_json;
use crate::files;
use crate::gpus;
use crate::human::{self, several};
use crate::layers;
use crate::machine::VERSION;
use crate::plan::{TrainPlan, recompute, scaling_told};
use crate::tokenizer::Tokenizer;
use crate::transports;
use crate::tuning;
use collectives::Communicator;
use collectives::bootstrap::{Identity, Launcher};
use collectives::device::cuda::Survey;
use models::hf::rope_scaling;
use serde_json::{Value, json};
use zero::Placement;

/// What must be the same on every rank: who differs would compute something else, or make other calls.
pub fn signature(plan: &TrainPlan) -> Signature {
    let model = &plan.model.config;
    let (rate, adamw) = (&plan.rate, &plan.zero.adamw);
    vec![
        ("command", "train".to_owned()),
        ("version", VERSION.to_owned()),
        ("--model", format!("{model:?}")),
        ("weights of --model", plan.model.fingerprint()),
        ("--tokenizer", plan.tokenizer.as_ref().map_or("not known".to_owned(), Tokenizer::fingerprint)),
        ("--append-eod", Tokenizer::eod_told(plan.tokenizer.as_ref())),
        ("--data", plan.feed.fingerprint()),
        ("--val-data", plan.feed.held_fingerprint()),
        ("--device", plan.device.name().to_owned()),
        ("--attention", plan.attention().unwrap_or("none").to_owned()),
        ("--offload", plan.offload().to_owned()),
        ("--cuda-graphs", plan.cuda_graphs.to_string()),
        ("--stage", plan.zero.stage.level().to_string()),
        ("--dtype", plan.dtype.name()),
        ("--loss-scale", scaling_told(plan.zero.scaling)),
        ("--matmul-precision", plan.batch.matmul_precision(plan.dtype).unwrap_or("none").to_owned()),
        ("--steps", plan.steps.to_string()),
        ("--micro-batch", plan.batch.rows.to_string()),
        ("--accumulate", plan.zero.accumulate.to_string()),
        ("--reproducible", plan.zero.reproducible.to_string()),
        ("--recompute", recompute(plan.batch.recompute).to_owned()),
        ("--seq", plan.batch.length.to_string()),
        ("--lr", rate.peak.to_string()),
        ("--min-lr", rate.floor.to_string()),
        ("--warmup", rate.warmup.to_string()),
        ("--warmup-shape", rate.rise.name()),
        ("--warmup-from", rate.start.to_string()),
        ("--schedule", rate.shape.name()),
        ("--schedule-steps", schedule_steps(plan)),
        ("--weight-decay", adamw.weight_decay.to_string()),
        ("--beta1", adamw.beta1.to_string()),
        ("--beta2", adamw.beta2.to_string()),
        ("--eps", adamw.eps.to_string()),
        ("--clip", plan.zero.clip.unwrap_or(0.0).to_string()),
        ("--seed", plan.seed.to_string()),
        ("--order", plan.order.name()),
        ("--eval-every", plan.eval_every.to_string()),
        ("--eval-tokens", plan.eval_tokens.to_string()),
        ("--metrics", files::wanted(plan.metrics.as_deref())),
        ("--trace", plan.traced.as_ref().map_or("not given".to_owned(), |t| t.to_string())),
        (
            "--checkpoint",
            plan.checkpoints.as_ref().map_or("not given".to_owned(), |c| {
                let beside = if c.beside { ", beside the run" } else { "" };
                format!("every {} steps, {} kept{beside}", c.every, c.keep)
            }),
        ),
        ("--resume", resumed(plan)),
        ("--save", files::wanted(plan.save.as_deref())),
        ("--prefetch", plan.zero.prefetch.to_string()),
        ("--progress", plan.progress.name()),
        ("--bucket-size", plan.zero.bucket_bytes.to_string()),
        ("--sample", plan.sample.to_string()),
    ]
}

/// Until when the schedule goes, where that is not the end of the run.
fn schedule_steps(plan: &TrainPlan) -> String {
    match plan.rate.steps == plan.steps {
        true => "as --steps".to_owned(),
        false => plan.rate.steps.to_string(),
    }
}

/// Where a training goes on.
fn resumed(plan: &TrainPlan) -> String {
    let mark = plan.state().map_or(String::new(), |state| format!(", digest {}", state.mark));
    format!("after step {}{mark}", plan.made_before())
}

/// One line that says what is about to happen.
pub(super) fn headline(plan: &TrainPlan) -> String {
    let micro = match plan.zero.accumulate {
        1 => String::new(),
        n => format!(" x {n} micro-batches"),
    };
    let state = plan.checkpoints.as_ref().filter(|checkpoints| checkpoints.made() > 0);
    let weights = match (&plan.model.weights, state) {
        (_, Some(state)) => format!("after step {}", state.made()),
        // Which is all that --save keeps of a run.
        (Some(weights), None) => format!("weights of {}, a new optimizer", weights.dir().display()),
        (None, None) => "new weights".to_owned(),
    };
    // Which text tokens are, or why nobody can tell.
    let tokenizer = match (&plan.tokenizer, plan.sample) {
        (Some(tokenizer), _) => format!(", tokenizer {}", tokenizer.name()),
        (None, 0) => String::new(),
        (None, _) => ", tokenizer not known: no sample will be shown (--tokenizer names it)".to_owned(),
    };
    let steps = plan.steps - plan.made_before();
    let (trained, held_out) = (steps.saturating_mul(plan.step_tokens), plan.feed.held_out_tokens());
    let evaluated = match held_out > trained {
        true => format!(
            "\nthe evaluation at the end takes all {} tokens that are held out, and training {}: {}",
            human::count(held_out as f64),
            human::count(trained as f64),
            match plan.feed.names_held_out() {
                true => "fewer --val-data take less time",
                false => "a lower --val-fraction holds out fewer",
            }
        ),
        false => String::new(),
    };
    format!(
        "training {} ({} parameters, {weights}) on {} x {}{} over {}, ZeRO stage {}, {}{}{}\n\
         {}{tokenizer}; {} of {}{micro} x {} x {}{evaluated}",
        plan.model.name,
        human::count(plan.model.config.parameters() as f64),
        several(plan.ranks.world, "rank"),
        several(plan.ranks.threads, "thread"),
        plan.device.describe(),
        plan.ranks.asked(),
        plan.zero.stage,
        plan.dtype.name(),
        plan.batch.products_remark(&plan.device),
        match plan.zero.placement {
            Placement::Offloaded => ", optimizer on the host",
            _ => "",
        },
        plan.feed.describe(),
        several(plan.steps, "step"),
        several(plan.ranks.world, "rank"),
        several(plan.batch.rows, "sequence"),
        several(plan.batch.length, "token")
    )
}

/// The configuration of the run, what started it, and the machines and versions that it has. `hosts`: every rank's, by their
/// names.
pub(super) fn run(plan: &TrainPlan, comm: &Communicator, hosts: &[String]) -> Value {
    let library = match plan.ranks.nccl {
        true => gpus::library(),
        false => transports::library(layers::between(comm.transport_name())),
    };
    let mut all = about(&now(), library);
    // Ranks that have met have an identity that makes sense.
    let launcher = Identity::from_env().ok().flatten().map_or(Launcher::Caravan, |rank| rank.launcher);
    all["launcher"] = launcher.name().into();
    all["hosts"] = by_host(hosts);
    all["cuda"] = match plan.device {
        Device::Cuda(_) => cuda_json(&Survey::take()),
        Device::Cpu | Device::Emulated(_) => Value::Null,
    };
    if let (Value::Object(all), Value::Object(settings)) = (&mut all, settings(plan)) {
        all.extend(settings);
    }
    all
}

/// Which ranks are where, hosts in the order of their first ranks.
fn by_host(hosts: &[String]) -> Value {
    let mut all: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, host) in hosts.iter().enumerate() {
        match all.iter_mut().find(|(name, _)| name == host) {
            Some((_, ranks)) => ranks.push(rank),
            None => all.push((host, vec![rank])),
        }
    }
    all.into_iter().map(|(host, ranks)| json!({"host": host, "ranks": ranks})).collect()
}

/// Every flag's value.
fn settings(plan: &TrainPlan) -> Value {
    let model = &plan.model.config;
    json!({
        "model": {
            "name": plan.model.name,
            "parameters": model.parameters(),
            "hidden": model.hidden,
            "layers": model.layers,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "ffn": model.ffn,
            "vocab": model.vocab,
            "context": model.context,
            "tied": model.tied,
            "rope": {"theta": model.rope.theta, "scaling": rope_scaling(model.rope.scaling)},
            "norm_eps": human::as_written(model.norm_eps),
            "initializer_range": plan.model.remarks.initializer_range,
            "from_directory": plan.model.weights.is_some(),
        },
        "data": plan.feed.json(&plan.data),
        "val_data": plan.feed.held_json(&plan.val_data),
        "tokenizer": plan.tokenizer.as_ref().map(Tokenizer::name),
        "append_eod": plan.tokenizer.as_ref().and_then(Tokenizer::eod),
        "ranks": plan.ranks.world,
        "transport": plan.ranks.asked(),
        "ranks_per_node": plan.asked.ranks_per_node,
        "emulate_link": plan.asked.emulate_link,
        "share_gpus": plan.asked.share_gpus,
        "tuning": tuning::named(plan.asked.tuning.as_ref()).map(|path| path.display().to_string()),
        "rendezvous_timeout": plan.asked.rendezvous_timeout.value(),
        "call_timeout": plan.asked.call_timeout.value(),
        "threads": plan.ranks.threads,
        "device": plan.device.name(),
        "attention": plan.attention(),
        "offload": plan.offload(),
        "cuda_graphs": plan.cuda_graphs,
        "stage": plan.zero.stage.level(),
        "dtype": plan.dtype.name(),
        "loss_scale": plan.zero.scaling.map(|scaling| scaling_told(Some(scaling))),
        "matmul_precision": plan.batch.products(plan.dtype, &plan.device),
        "steps": plan.steps,
        "micro_batch": plan.batch.rows,
        "accumulate": plan.zero.accumulate,
        "reproducible": plan.zero.reproducible,
        "seq": plan.batch.length,
        "flops_per_token": model.flops_per_token(plan.batch.length),
        "lr": plan.rate.peak,
        "min_lr": plan.rate.floor,
        "warmup": plan.rate.warmup,
        "warmup_shape": plan.rate.rise.name(),
        "warmup_from": plan.rate.start,
        "schedule": plan.rate.shape.name(),
        "schedule_steps": plan.rate.steps,
        "weight_decay": human::as_written(plan.zero.adamw.weight_decay),
        "beta1": human::as_written(plan.zero.adamw.beta1),
        "beta2": human::as_written(plan.zero.adamw.beta2),
        "eps": human::as_written(plan.zero.adamw.eps),
        "clip": plan.zero.clip.map(human::as_written),
        "seed": plan.seed,
        "order": plan.order.name(),
        "recompute": recompute(plan.batch.recompute),
        "prefetch": plan.zero.prefetch,
        "progress": plan.progress.name(),
        "bucket_bytes": plan.zero.bucket_bytes,
        "eval_every": plan.eval_every,
        "eval_tokens": plan.eval_tokens,
        "val_fraction": plan.val_fraction,
        "sample": plan.sample,
        "trace": plan.traced.as_ref().map(|traced| traced.path.display().to_string()),
        "trace_steps": plan.traced.as_ref().filter(|traced| !traced.steps.is_empty())
            .map(|traced| [*traced.steps.start(), *traced.steps.end()]),
        "checkpoint": plan.checkpoints.as_ref().map(|c| c.dir.display().to_string()),
        "checkpoint_every": plan.checkpoints.as_ref().map(|c| c.every),
        "checkpoint_keep": plan.checkpoints.as_ref().map(|c| c.keep),
        "checkpoint_async": plan.checkpoints.as_ref().map(|c| c.beside),
        "resumed_after": plan.checkpoints.as_ref().map(Checkpoints::made).filter(|&made| made > 0),
        "save": plan.save.as_ref().map(|path| path.display().to_string()),
        "deepspeed": plan.configuration.as_ref().map(deepspeed::File::json),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Attention;
    use crate::checkpoint::State;
    use crate::device::tests::gpus;
    use crate::plan::tests::plan;
    use std::collections::BTreeSet;
    use std::fs;

    #[test]
    fn ranks_are_told_by_host() {
        let hosts = ["b", "a", "b", "a"].map(str::to_owned);
        let expected = json!([{"host": "b", "ranks": [0, 2]}, {"host": "a", "ranks": [1, 3]}]);
        assert_eq!(by_host(&hosts), expected);
    }

    /// What ranks would be told to differ in.
    fn differences(one: &TrainPlan, other: &TrainPlan) -> Vec<&'static str> {
        let (one, other) = (signature(one), signature(other));
        assert_eq!(one.len(), other.len());
        one.iter().zip(&other).filter(|(one, other)| one != other).map(|((name, _), _)| *name).collect()
    }

    /// Each differs by itself in one value, so that none may be left out of what is compared.
    #[test]
    fn ranks_compare_every_flag_that_has_to_be_the_same() {
        let home = tempfile::tempdir().unwrap();
        let path = |name: &str| home.path().join(name).display().to_string();
        for (name, line) in
            [("a.txt", "many ranks\n"), ("b.txt", "other ranks\n"), ("c.txt", "third ranks\n")]
        {
            fs::write(path(name), line.repeat(100).split_at(1000).0).unwrap();
        }
        for (name, range) in [("a.json", 0.02), ("b.json", 0.5)] {
            let shape = json!({
                "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                "intermediate_size": 176, "vocab_size": 256, "initializer_range": range,
            });
            fs::write(path(name), shape.to_string()).unwrap();
        }
        fs::create_dir(path("d")).unwrap();
        let words = json!({"type": "WordLevel", "vocab": {"?": 0, "many": 1, "ranks": 2, "over": 3}, "unk_token": "?"});
        let words = json!({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words});
        fs::write(path("d/tokenizer.json"), words.to_string()).unwrap();
        fs::write(path("d/tokenizer_config.json"), json!({"eos_token": "over"}).to_string()).unwrap();
        let [a_text, b_text, c_text, a_model, b_model] =
            ["a.txt", "b.txt", "c.txt", "a.json", "b.json"].map(path);
        let plan_of = |flags: &str| {
            let usual = [
                format!("--data {a_text}"),
                "--model nano".into(),
                "--seq 8".into(),
                "--micro-batch 2".into(),
                "--steps 4".into(),
                "--transport threads".into(),
            ];
            let given: Vec<&str> = flags.split_whitespace().collect();
            let others = usual.iter().filter(|flag| !given.contains(&flag.split_once(' ').unwrap().0));
            plan(&others.fold(flags.to_owned(), |flags, flag| format!("{flags} {flag}")))
        };
        let mut compared = BTreeSet::new();
        let mut check = |what: &str, one: &TrainPlan, other: &TrainPlan, expected: &[&'static str]| {
            assert_eq!(differences(one, other), expected, "{what}");
            compared.extend(expected);
        };
        for (beside, flags, expected) in [
            ("", "--model baby", &["--model"][..]),
            ("", &format!("--data {b_text}"), &["--data"]),
            ("", "--val-fraction 0.3", &["--data"]),
            ("--order sequential", &format!("--val-data {b_text}"), &["--val-data"]),
            (&format!("--val-data {b_text}"), &format!("--val-data {c_text}"), &["--val-data"]),
            ("--data random", "--tokenizer bytes", &["--tokenizer"]),
            (
                &format!("--tokenizer {}", path("d/tokenizer.json")),
                "--append-eod",
                &["--append-eod", "--data"],
            ),
            ("", "--stage 2", &["--stage"]),
            ("", "--dtype f32", &["--dtype", "--matmul-precision"]),
            ("", "--dtype f16", &["--dtype", "--loss-scale"]),
            ("--dtype f16", "--loss-scale 64", &["--loss-scale"]),
            ("--dtype f32", "--matmul-precision high", &["--matmul-precision"]),
            ("", "--steps 5", &["--steps"]),
            ("--schedule-steps 9", "--steps 5", &["--steps"]),
            ("", "--micro-batch 3", &["--micro-batch"]),
            ("", "--accumulate 2", &["--accumulate"]),
            ("", "--reproducible", &["--reproducible"]),
            ("", "--recompute full", &["--recompute"]),
            ("", "--seq 7", &["--seq"]),
            ("--min-lr 1e-5", "--lr 2e-3", &["--lr"]),
            ("", "--min-lr 2e-5", &["--min-lr"]),
            ("", "--warmup 2", &["--warmup"]),
            ("", "--warmup-shape log", &["--warmup-shape"]),
            ("", "--warmup-from 1e-4", &["--warmup-from"]),
            ("", "--schedule linear", &["--schedule"]),
            ("", "--schedule-steps 9", &["--schedule-steps"]),
            ("", "--weight-decay 0", &["--weight-decay"]),
            ("", "--beta1 0.8", &["--beta1"]),
            ("", "--beta2 0.8", &["--beta2"]),
            ("", "--eps 1e-7", &["--eps"]),
            ("", "--clip 0", &["--clip"]),
            ("", "--seed 7", &["--seed"]),
            ("--val-fraction 0.1", "--order sequential", &["--order"]),
            ("", "--eval-every 2", &["--eval-every"]),
            ("--eval-every 2", "--eval-tokens 50", &["--eval-tokens"]),
            ("", &format!("--metrics {}", path("m.jsonl")), &["--metrics"]),
            ("", &format!("--trace {}", path("t.json")), &["--trace"]),
            ("--trace t.json", "--trace-steps 1-2", &["--trace"]),
            ("", &format!("--checkpoint {}", path("c")), &["--checkpoint"]),
            ("--checkpoint c", "--checkpoint-every 5", &["--checkpoint"]),
            ("--checkpoint c", "--checkpoint-keep 2", &["--checkpoint"]),
            ("--checkpoint c", "--checkpoint-async", &["--checkpoint"]),
            ("", &format!("--save {}", path("saved")), &["--save"]),
            ("", "--prefetch off", &["--prefetch"]),
            ("", "--progress thread", &["--progress"]),
            ("", "--bucket-size 1M", &["--bucket-size"]),
            ("", "--sample 5", &["--sample"]),
            // How a rank computes and what it shows is its own affair.
            ("", "--threads 2 --call-timeout 7 --color never", &[]),
        ] {
            check(flags, &plan_of(beside), &plan_of(&format!("{beside} {flags}")), expected);
        }
        let of_model = |model: &str| plan_of(&format!("--model {model}"));
        check("weights", &of_model(&a_model), &of_model(&b_model), &["weights of --model"]);

        let after = |made| {
            let from = Some(State::after(made));
            let checkpoints = Checkpoints { dir: "c".into(), every: 5, keep: 1, beside: false, from };
            TrainPlan { checkpoints: Some(checkpoints), ..plan_of("") }
        };
        check("--resume", &after(0), &after(3), &["--resume"]);
        // These need a GPU to be asked for.
        let on = |device: Device| TrainPlan { device, ..plan_of("") };
        let gpu = |attention| {
            let mut gpu = gpus(1);
            gpu.attention = attention;
            gpu
        };
        let (mma, wgmma) = (on(Device::Cuda(gpu(Attention::Mma))), on(Device::Cuda(gpu(Attention::Wgmma))));
        check("device", &plan_of(""), &mma, &["--device", "--attention"]);
        check("emulation", &mma, &on(Device::Emulated(gpu(Attention::Mma))), &["--device"]);
        check("attention", &mma, &wgmma, &["--attention"]);
        let mut offloaded = plan_of("");
        offloaded.zero.placement = Placement::Offloaded;
        check("offload", &plan_of(""), &offloaded, &["--offload"]);
        check("graphs", &plan_of(""), &TrainPlan { cuda_graphs: true, ..plan_of("") }, &["--cuda-graphs"]);

        // What one program has is the same in all plans of it.
        compared.extend(["command", "version"]);
        assert_eq!(compared, signature(&plan_of("")).iter().map(|(name, _)| *name).collect());
    }
}
